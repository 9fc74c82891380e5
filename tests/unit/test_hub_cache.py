"""What of a hub's model lies in the cache: where that is, its shapes for the server half, its size for the trainer."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge.errors import ConfigError
from bridge.hub_cache import cache_folder, model_folder
from hub_files import cached
from served import tiny_model
from server_env.adapters.peft_adapter import BaseModel
from trainer_env import config, models
from trainer_env.config import PlacementConfig
from trainer_env.devices import Device, Devices
from trainer_env.models import weights
from trainer_env.models.weights import weights_bytes
from trainer_env.placement import depends_on_weights
from trainer_env.session import opening

GIB = 2**30
NAME = "owner/some-model"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "~/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "~/hf", "XDG_CACHE_HOME": "/x"}, "~/hf/hub"),
        ({"HF_HOME": "/hf", "HUGGINGFACE_HUB_CACHE": "/old"}, "/old"),
        ({"HF_HOME": "/hf", "HUGGINGFACE_HUB_CACHE": "/old", "HF_HUB_CACHE": "$HOME/new"}, "~/new"),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(variables, expected):
    assert cache_folder(variables) == Path(expected).expanduser()


def test_a_model_is_its_folder_or_the_revision_that_was_fetched_last(hub, tmp_path):
    assert model_folder(NAME) is None
    cached(hub, NAME, {"config.json": b"{}"}, "a" * 40)
    newer = cached(hub, NAME, {"config.json": b"{}"}, "b" * 40)
    assert model_folder(NAME) == newer
    assert model_folder("gpt2") is None
    assert cached(hub, "gpt2", {}) == model_folder("gpt2")
    (tmp_path / NAME).mkdir(parents=True)
    assert model_folder(NAME) == Path(NAME)


@pytest.mark.parametrize(
    ("stored", "loaded", "expected"),
    [
        ({"dtype": "bfloat16"}, "auto", 1000),
        ({"torch_dtype": "float32"}, "auto", 500),
        ({"dtype": "float32"}, "float32", 1000),
        ({"dtype": "float16"}, "float32", 2000),
        ({}, "bfloat16", 1000),
        ([], "auto", 1000),
    ],
)
def test_a_model_is_as_large_as_it_is_loaded_whatever_it_is_stored_in(hub, stored, loaded, expected):
    cached(hub, NAME, {"config.json": json.dumps(stored).encode(), "model.safetensors": b"w" * 1000})
    assert weights_bytes(NAME, loaded) == expected


@pytest.mark.parametrize("name", ["no such model", "a/b/c", "/no/such/folder", "x" * 300, "nul\0", "~nosuchuser/m"])
def test_what_is_no_model_has_no_folder(hub, name):
    assert model_folder(name) is None


def test_the_folder_of_nobody_is_no_model_by_name():
    with pytest.raises(ConfigError, match="no model folder ~nosuchuser/m"):
        models.resolve("~nosuchuser/m")


def test_without_a_home_the_cache_is_somewhere_and_empty(hub, monkeypatch):
    def unknown(_uid: int) -> None:
        raise KeyError

    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert cache_folder() == Path("~/.cache/huggingface/hub")
    assert model_folder(NAME) is None


def test_a_revision_that_is_gone_is_none(hub):
    snapshot = cached(hub, NAME, {})
    snapshot.rmdir()
    assert model_folder(NAME) is None
    (hub / "models--owner--some-model" / "refs" / "main").write_text("")
    assert model_folder(NAME) is None


def test_the_server_half_knows_a_cached_models_shapes_and_none_of_another(hub, tmp_path):
    folder = tiny_model(tmp_path / "model")
    assert BaseModel.read(NAME) == BaseModel()
    cached(hub, NAME, {"config.json": (folder / "config.json").read_bytes()})
    assert BaseModel.read(NAME) == BaseModel.read(str(folder)) != BaseModel()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"model.safetensors": 70}, 70),
        ({"model-1-of-2.safetensors": 70, "model-2-of-2.safetensors": 30}, 100),
        ({"model.safetensors": 70, "pytorch_model.bin": 71, "consolidated.safetensors": 72}, 70),
        ({"weights.safetensors": 70, "pytorch_model.bin": 71}, 70),
        ({"pytorch_model.bin": 71}, 71),
        ({"config.json": 5, "tokenizer.json": 900}, None),
    ],
)
def test_the_weights_that_would_be_loaded_are_weighed(hub, tmp_path, files, expected):
    content = {name: bytes(size) for name, size in files.items()}
    cached(hub, NAME, content)
    assert weights_bytes(NAME) == expected
    (tmp_path / "mine").mkdir()
    for name, data in content.items():
        (tmp_path / "mine" / name).write_bytes(data)
    assert weights_bytes("mine") == weights_bytes(str(tmp_path / "mine")) == expected


def test_the_index_tells_the_size_of_weights_that_are_not_fetched_yet(hub):
    index = json.dumps({"metadata": {"total_size": 5000}, "weight_map": {}}).encode()
    cached(hub, NAME, {INDEX: index, "model-1-of-2.safetensors": bytes(70)})
    assert weights_bytes(NAME) == 5000
    cached(hub, "owner/torn", {INDEX: b"{", "model-1-of-1.safetensors": bytes(70)})
    assert weights_bytes("owner/torn") == 70


class Hub:
    """Stands in for huggingface_hub: what a model's page says, and what was asked."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def model_info(self, name, **options):
        self.asked.append((name, options))
        if isinstance(self.answer, Exception):
            raise self.answer
        files = [SimpleNamespace(rfilename=file, size=size) for file, size in self.answer.items()]
        return SimpleNamespace(siblings=files)


@pytest.fixture
def online(hub, monkeypatch):
    def online(answer):
        stand_in = Hub(answer)
        monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=lambda: stand_in))
        monkeypatch.setattr(weights, "unreachable", lambda: "")
        return stand_in

    return online


def test_the_hub_is_asked_once_and_not_for_long_about_a_model_that_is_not_cached(hub, online):
    asked = online({"model.safetensors": 3 * GIB, "onnx/model.safetensors": 7 * GIB, "original/x.bin": None}).asked
    assert weights_bytes(NAME) == 3 * GIB
    ((name, options),) = asked
    assert name == NAME
    assert 0 < options["timeout"] <= 10
    cached(hub, NAME, {"model.safetensors": bytes(70)})
    assert weights_bytes(NAME) == 70
    assert len(asked) == 1


def test_a_hub_that_fails_or_cannot_be_reached_says_nothing(hub, online, monkeypatch):
    online(RuntimeError("503"))
    assert weights_bytes(NAME) is None
    asked = online({"model.safetensors": 5}).asked
    monkeypatch.setattr(weights, "unreachable", lambda: "cannot be reached")
    assert weights_bytes(NAME) is None
    assert not asked


def test_a_folder_without_weights_is_nothing_to_ask_the_hub_about(hub, tmp_path, online):
    asked = online({"model.safetensors": 5}).asked
    (tmp_path / NAME).mkdir(parents=True)
    assert weights_bytes(NAME) is None
    assert not asked


def test_one_gpu_is_shared_by_a_run_of_a_hub_model_that_fits_and_nobody_is_asked_on_a_cpu(hub, online, monkeypatch):
    recipe = config.load(Path(__file__).parents[2] / "configs" / "qwen-gsm8k.toml")
    asked = online({"model.safetensors": 3 * GIB}).asked
    monkeypatch.setattr(opening, "detect", lambda: Devices(cores=8))
    assert opening.place(recipe, "x").mode == "cpu"
    assert not asked
    gpu = Device(id="0", total_bytes=140 * GIB, free_bytes=130 * GIB)
    monkeypatch.setattr(opening, "detect", lambda: Devices(gpus=(gpu,), cores=8))
    assert opening.place(recipe, "x").mode == "shared"
    assert [name for name, _ in asked] == [recipe.model.name]
    index = json.dumps({"metadata": {"total_size": 40 * GIB}}).encode()
    cached(hub, recipe.model.name, {INDEX: index})
    assert opening.place(recipe, "x").mode == "time-share"
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("gpus", "settings", "expected"),
    [
        (0, {}, False),
        (1, {}, True),
        (1, {"trainer_gib": 9.0}, True),
        (1, {"mode": "time-share"}, True),
        (2, {}, False),
        (2, {"mode": "shared"}, True),
        (2, {"server_gpus": (0,)}, False),
    ],
)
def test_a_size_matters_on_one_gpu_only(gpus, settings, expected):
    devices = Devices(gpus=tuple(Device(id=str(index)) for index in range(gpus)))
    assert depends_on_weights(PlacementConfig(**settings), devices) is expected
