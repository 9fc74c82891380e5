"""What libraries print goes to the run's log, also when they kept the stream for later."""

import logging
import sys
import threading

from trainer_env.display.quiet import prints_to


def test_prints_go_to_the_file_and_the_terminal_comes_back(tmp_path, capsys):
    with prints_to(tmp_path / "trainer.log"):
        print("to the file")
        print("this too", file=sys.stderr)
    print("to the terminal")
    assert (tmp_path / "trainer.log").read_text() == "to the file\nthis too\n"
    assert capsys.readouterr() == ("to the terminal\n", "")


def test_a_handler_made_meanwhile_writes_to_the_file_afterwards_as_well(tmp_path, capsys):
    with prints_to(tmp_path / "trainer.log"):
        handler = logging.StreamHandler()
    handler.handle(logging.makeLogRecord({"msg": "late"}))
    assert (tmp_path / "trainer.log").read_text() == "late\n"
    assert capsys.readouterr() == ("", "")


def test_a_run_folder_that_was_deleted_is_no_error(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with prints_to(folder / "trainer.log"):
        folder.rmdir()
        print("nobody reads this")
    assert not folder.exists()


def test_in_a_thread_only_what_that_thread_prints_goes_to_the_file(tmp_path, capsys):
    inside, done = threading.Event(), threading.Event()

    def work():
        with prints_to(tmp_path / "trainer.log"):
            print("from the library")
            inside.set()
            assert done.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    print("from the user")
    done.set()
    thread.join()
    assert (tmp_path / "trainer.log").read_text() == "from the library\n"
    assert capsys.readouterr().out == "from the user\n"
