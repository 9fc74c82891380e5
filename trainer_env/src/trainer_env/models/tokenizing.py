"""A model's tokenizer and chat template, as much of them as asking a server needs.

Transformers would do, but importing it imports torch: ten seconds, before a new kernel has seen anything.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bridge.errors import ConfigError

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")
_END = "END-OF-LAST-MESSAGE "
"""Put at the end of a message that is to be gone on with; the space shows whether the template trims."""

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """What `Sampler` uses of a transformers tokenizer, with the same results. folder: of a Hugging Face model.

    eos_token_ids: every token that ends a completion, the tokenizer's and the model's own.
    """

    def __init__(self, folder: Path) -> None:
        settings = _read(folder / "tokenizer_config.json")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()  # What a tokenizer was saved with is not what a run asks for.
        self._tokenizer.no_padding()
        self._special = {name: _content(settings[name]) for name in SPECIAL if settings.get(name)}
        self.chat_template = _chat_template(folder, settings)
        self.cleans_up = bool(settings.get("clean_up_tokenization_spaces"))
        """Whether transformers takes spaces out of decoded text, which this one does not."""
        self.eos_token_ids = self._eos_token_ids(folder)

    @property
    def eos_token_id(self) -> int:
        """The token that ends a turn."""
        return self.eos_token_ids[0]

    def __call__(self, text: str) -> dict[str, list[int]]:
        """A text's token ids, with the special tokens that the model wants around it."""
        return {"input_ids": self._tokenizer.encode(text).ids}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of some tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """A conversation as token ids, or as text. variables: for the template. Raises ConfigError where it refuses."""
        assert not return_dict, "only token ids or text"
        if continue_final_message:
            *earlier, last = conversation
            conversation = [*earlier, {**last, "content": f"{last['content']}{_END}"}]
        try:
            text = self._template.render(
                messages=conversation,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"The model's chat template does not take this conversation: {error}.",
                remedy="Leave out the system prompt, or set data.chat = false.",
            ) from None
        if continue_final_message:
            text = _up_to_the_end(text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids if tokenize else text

    @cached_property
    def _template(self) -> jinja2.Template:
        """Compiled when it is first needed, which takes ten times as long as using it."""
        return _environment().from_string(self.chat_template)

    def _eos_token_ids(self, folder: Path) -> tuple[int, ...]:
        own = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        declared = _read(folder / "generation_config.json").get("eos_token_id")
        if declared is None:
            declared = _read(folder / "config.json").get("eos_token_id")
        declared = [declared] if isinstance(declared, int) else declared or []
        return tuple(dict.fromkeys([*([] if own is None else [own]), *declared]))


def load(model: str) -> Any:
    """The tokenizer of what `models.resolve` returned; transformers' own where the model has no tokenizer.json.

    Raises ConfigError.
    """
    found = light(model)
    if found and not found.cleans_up:
        return found
    from trainer_env.training.grpo import import_unsloth

    import_unsloth()  # Before transformers, for the day this process trains.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def light(model: str) -> Tokenizer | None:
    """The same without torch, but for the spaces of decoded text; None where the model has no tokenizer.json.

    Raises ConfigError.
    """
    folder = Path(model)
    if not folder.is_dir():
        folder = _from_hub(model)
    return Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


def _from_hub(model: str) -> Path:
    """The folder of the hub's cache with the few files that are needed."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"The tokenizer of {model!r} cannot be fetched: {str(error).splitlines()[0]}", remedy="Check the network."
        ) from error


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):  # Several, by name.
        template = next((item["template"] for item in template if item["name"] == "default"), "")
    return template


def _environment() -> jinja2.Environment:
    """As models' templates expect it: templates come with models, and are not trusted."""
    extensions = [loopcontrols, _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training on it: to asking it means nothing."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What stands in between."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_now: Callable[[str], str] = lambda format_: datetime.now().astimezone().strftime(format_)  # noqa: E731 (a global of templates)


def _up_to_the_end(text: str) -> str:
    """The rendered conversation without what the template puts after its last message."""
    before, _, after = text.rpartition(_END.strip())
    trimmed = not after.startswith(_END[len(_END.strip()) :])  # Then the template trims messages.
    return before.rstrip() if trimmed else before
