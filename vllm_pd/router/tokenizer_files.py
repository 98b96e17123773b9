# SPDX-License-Identifier: Apache-2.0
"""A model's tokenizer and chat template from its files, for a router without transformers, which takes 130 MB.

Has as much of the interface of a fast tokenizer of transformers as `vllm_pd.router.tokenizer` uses. `tokenizer.json` is
taken as it is. transformers changes some tokenizers after it has read that file, by the class that
`tokenizer_config.json` names; the ids of such a model differ from its engines', so that its prompts have no overlap
with what these announce. A router with transformers installed uses that.
"""
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"  # in it, or `chat_template` in the configuration
OTHER_TEMPLATES = "additional_chat_templates"  # a folder
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # as transformers marks the end of the message to continue


class FileTokenizer:
    """The tokenizer of the model `name`, a folder or a name on the hub. Safe to use from several threads. The
    constructor raises OSError for files that are not there or can't be read, ValueError for what is no JSON, and
    whatever `tokenizers` and jinja2 raise."""
    is_fast = True

    def __init__(self, name: str) -> None:
        folder = _folder(name)
        if not (folder / FILE).is_file():
            raise FileNotFoundError(f"{name} has no {FILE}: only transformers can read its tokenizer: pip install "
                                    "transformers")
        self.backend_tokenizer = Tokenizer.from_file(str(folder / FILE))
        config = _read_json(folder / CONFIG)
        self._special = {key: text for key in SPECIAL if (text := _text_of(config.get(key))) is not None}
        environment = new_environment()
        self._templates = {key: environment.from_string(text) for key, text in _templates(folder, config).items()}

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], *, tools: Any, add_generation_prompt: bool,
                            continue_final_message: bool, chat_template: None = None, tokenize: bool = False,
                            **more: Any) -> str:
        """The text of a chat. `more` goes to the template, too. Raises ValueError for a model without a template and
        for a last message that can't be continued, and whatever jinja2 raises."""
        template = self._templates.get(TOOL_TEMPLATE) if tools is not None else None
        template = template or self._templates.get(DEFAULT_TEMPLATE)
        if template is None:
            raise ValueError(f"the model has no chat template: neither {TEMPLATE} nor one in {CONFIG}")
        if continue_final_message:
            *others, last = messages
            messages = [*others, {**last, "content": last["content"] + CONTINUED}]
        text = template.render(messages=messages, tools=tools, documents=None,
                               add_generation_prompt=add_generation_prompt, **{**self._special, **more})
        return _before_mark(text) if continue_final_message else text


def new_environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for, as transformers makes it: a sandbox, because they are programs of others."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[GenerationBlocks, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}`, by which templates mark answers for training: only the text counts."""
    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside. Called by jinja2."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration", ), drop_needle=True)


def _folder(name: str) -> Path:
    """The folder of a model; that of one on the hub is fetched, as far as it is needed."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    return Path(snapshot_download(name, allow_patterns=[FILE, CONFIG, TEMPLATE, f"{OTHER_TEMPLATES}/*.jinja"]))


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name. The files have precedence over the configuration, as with transformers."""
    found = config.get("chat_template") or {}
    if isinstance(found, str):
        found = {DEFAULT_TEMPLATE: found}
    elif isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}
    files = {path.stem: path for path in folder.glob(f"{OTHER_TEMPLATES}/*.jinja")}
    if (folder / TEMPLATE).is_file():
        files[DEFAULT_TEMPLATE] = folder / TEMPLATE
    return {name: path.read_text() for name, path in files.items()} or found


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _text_of(token: Any) -> str | None:
    """A special token, which is a text or an object with one."""
    return token.get("content") if isinstance(token, dict) else token


def _before_mark(text: str) -> str:
    """The text up to the mark; without the spaces before it, if the template has removed those after it."""
    at = text.rfind(CONTINUED.strip())
    if at < 0:
        raise ValueError("the chat template leaves out the end of the message that is to be continued")
    return text[:at] if text[at:at + len(CONTINUED)] == CONTINUED else text[:at].rstrip()


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
