"""On a host without a CUDA toolkit SGLang gets the compiler of its environment, where kernels are compiled with it."""

from pathlib import Path

import msgspec
import pytest

from server_env.config import ServerConfig
from server_env.engines import cuda_toolkit, sglang
from server_env.engines.cuda_toolkit import variables


@pytest.fixture
def packages(tmp_path):
    """Site-packages as envs.lock fills them."""
    own = tmp_path / "site-packages" / "nvidia" / "cu13"
    for name in ("bin/nvcc", "include/cuda_runtime.h", "nvvm/bin/cicc", "lib/libcudart.so.13"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).touch(mode=0o755)
    return tmp_path / "site-packages"


def found(tmp_path, packages, system="none", **environment):
    return variables(tmp_path / "cache", {"PATH": "", **environment}, tmp_path / system, packages)


def test_what_is_called_and_linked_with_is_where_it_is_looked_for(tmp_path, packages):
    for _ in range(2):  # Each life of an engine.
        home = Path(found(tmp_path, packages)["CUDA_HOME"])
        assert home.is_relative_to(tmp_path / "cache")
        for name in ("bin/nvcc", "include/cuda_runtime.h", "nvvm/bin/cicc"):
            assert (home / name).samefile(packages / "nvidia" / "cu13" / name)
        assert [path.name for path in (home / "lib64").iterdir()] == ["libcudart.so"]
        assert (home / "lib64" / "libcudart.so").samefile(packages / "nvidia/cu13/lib/libcudart.so.13")


def test_an_environment_that_was_built_again_elsewhere_is_followed(tmp_path, packages):
    found(tmp_path, packages)
    moved = packages.rename(tmp_path / "built-again")
    home = Path(found(tmp_path, moved)["CUDA_HOME"])
    assert (home / "bin" / "nvcc").samefile(moved / "nvidia/cu13/bin/nvcc")


@pytest.mark.parametrize("where", ["CUDA_HOME", "CUDA_PATH", "PATH", "system"])
def test_a_toolkit_of_the_host_is_left_alone_wherever_it_is_found(tmp_path, packages, where):
    nvcc = tmp_path / "host" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(mode=0o755)
    at = {"PATH": {"PATH": str(nvcc.parent)}, "system": {"system": "host"}}.get(where, {where: str(nvcc.parents[1])})
    assert found(tmp_path, packages, **at) == {}
    nvcc.unlink()
    assert found(tmp_path, packages, **at)  # A toolkit without its compiler, as containers have, is none.


def test_an_environment_without_a_compiler_says_nothing(tmp_path, packages):
    (packages / "nvidia/cu13/bin/nvcc").unlink()
    assert found(tmp_path, packages) == found(tmp_path, tmp_path) == {}
    assert not (tmp_path / "cache").exists()


def test_sglang_gets_it_on_a_gpu_and_what_the_user_sets_wins(tmp_path, packages, monkeypatch):
    monkeypatch.setattr(cuda_toolkit, "variables", lambda cache: {"CUDA_HOME": str(cache)})

    def home(device, **section):
        server = msgspec.convert({"model": "m", "backend": "sglang", **section}, ServerConfig)
        options = sglang.resolve(server, sglang.SGLangConfig(), device)
        return sglang.environment(server, options, device, tmp_path, tmp_path).get("CUDA_HOME")

    assert home("cuda") == str(tmp_path)
    assert home("cpu") is None
    assert home("cuda", engine_env={"CUDA_HOME": "/mine"}) == "/mine"
