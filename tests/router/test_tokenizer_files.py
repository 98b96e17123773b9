# SPDX-License-Identifier: Apache-2.0
"""A tokenizer that is read from its files, without transformers, gives what transformers gives."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import SecurityError
from transformers import AutoTokenizer

from vllm_pd.router import tokenizer as tokenizer_module
from vllm_pd.router.tokenizer import Prompt, Tokenizer
from vllm_pd.router.tokenizer_files import FileTokenizer

MODEL = Path(os.environ["VLLM_PD_MODEL"])
TEXTS = ["", "a", "The capital of France is", "\u00e9\U0001f600 <|im_start|>user\n x", "7" * 300]
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What <b>&</b> why?"}]
BEGUN = [*QUESTION, {"role": "assistant", "content": "It is "}]
TOOL = {"type": "function", "function": {"name": "f", "description": "<d> \u00e9", "parameters": {"type": "object"}}}
RICH = """\
{{ bos_token }}{%- for message in messages %}
  {%- if message.role == "system" %}{% continue %}{% endif %}
  {%- generation %}[{{ message.content | trim }}]{% endgeneration %}
{%- endfor %}{{ {"x": "<\u00e9>", "y": [1]} | tojson(indent=1) }}{{ eos_token }}{{ extra }}{{ strftime_now("%Y") }}
{%- if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}:{% endif %}"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the model's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, tmp_path)
    return tmp_path


@pytest.fixture
def both(folder):
    """Make both tokenizers of that folder: ours, and the one of transformers."""
    return lambda: (FileTokenizer(str(folder)), AutoTokenizer.from_pretrained(str(folder)))


@pytest.mark.parametrize("model", ["VLLM_PD_MODEL", "VLLM_PD_TINY_MODEL"])
def test_ids_are_those_of_transformers(monkeypatch, model):
    theirs = Tokenizer(os.environ[model])
    monkeypatch.setattr(tokenizer_module, "find_spec", lambda name: None)
    ours = Tokenizer(os.environ[model])
    assert isinstance(ours._tokenizer, FileTokenizer) and not isinstance(theirs._tokenizer, FileTokenizer)
    prompts = [Prompt(prompt=text, add_special_tokens=special) for text in TEXTS for special in (True, False)]
    prompts += [Prompt(messages=QUESTION), Prompt(messages=QUESTION, add_generation_prompt=False),
                Prompt(messages=BEGUN, continue_final_message=True), Prompt(messages=QUESTION, tools=[TOOL])]
    for prompt in prompts:
        assert list(ours.tokens(prompt)) == list(theirs.tokens(prompt)), prompt
    text = "one two three four five six seven " * 40
    assert ours.partial(Prompt(prompt=text), 100) == theirs.partial(Prompt(prompt=text), 100) is not None


@pytest.mark.parametrize("options", [
    {"add_generation_prompt": True}, {"tools": [TOOL]}, {"extra": "more"}, {"bos_token": "changed"},
    {"messages": BEGUN, "continue_final_message": True}], ids=lambda options: ",".join(options))
@pytest.mark.parametrize("template", [None, RICH, "{{ messages[-1].content }}!"], ids=["own", "rich", "plain"])
def test_chats_are_rendered_as_by_transformers(folder, both, template, options):
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    ours, theirs = both()
    given = {"tools": None, "add_generation_prompt": False, "continue_final_message": False} | options
    messages = given.pop("messages", QUESTION)
    text = ours.apply_chat_template(messages, **given)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **given) and text.strip("!")


@pytest.mark.parametrize("places", ["config", "list", "folder", "file before config"])
def test_a_template_is_found_where_transformers_finds_it(folder, both, places):
    (folder / "chat_template.jinja").unlink()
    named = {"default": "D {{ messages[0].content }}", "tool_use": "T {{ messages[0].content }}"}
    if places == "config":
        write_config(folder, named["default"])
    elif places == "list":
        write_config(folder, [{"name": name, "template": text} for name, text in named.items()])
    elif places == "folder":
        (folder / "chat_template.jinja").write_text(named["default"])
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    else:
        write_config(folder, "not this one")
        (folder / "chat_template.jinja").write_text(named["default"])
    ours, theirs = both()
    texts = []
    for tools in (None, [TOOL]):
        given = {"tools": tools, "add_generation_prompt": True, "continue_final_message": False}
        texts.append(ours.apply_chat_template(QUESTION, **given))
        assert texts[-1] == theirs.apply_chat_template(QUESTION, tokenize=False, **given)
    assert [text[0] for text in texts] == (["D", "T"] if places in ("list", "folder") else ["D", "D"])


def write_config(folder: Path, template: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


@pytest.mark.parametrize("template, error", [
    ("{{ raise_exception('roles must alternate') }}", TemplateError),
    ("{{ messages.__class__.__mro__ }}", SecurityError),
    ("{{ messages.append(1) }}", SecurityError),
])
def test_templates_are_in_a_sandbox(folder, template, error):
    (folder / "chat_template.jinja").write_text(template)
    made = FileTokenizer(str(folder))
    with pytest.raises(error):
        made.apply_chat_template(QUESTION, tools=None, add_generation_prompt=True, continue_final_message=False)


def test_what_can_not_be_read_is_refused_with_the_cure(folder):
    (folder / "chat_template.jinja").write_text("nothing of the message")
    made, given = FileTokenizer(str(folder)), {"tools": None, "add_generation_prompt": False}
    with pytest.raises(ValueError, match="leaves out the end"):
        made.apply_chat_template(BEGUN, continue_final_message=True, **given)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        FileTokenizer(str(folder)).apply_chat_template(QUESTION, continue_final_message=False, **given)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json.*pip install transformers"):
        FileTokenizer(str(folder))


def test_it_needs_no_transformers():
    program = """if True:
        import sys
        sys.modules["transformers"] = sys.modules["numpy"] = None  # an import of it fails
        from vllm_pd.router import tokenizer
        tokenizer.find_spec = lambda name: None
        print(len(tokenizer.Tokenizer(sys.argv[1]).tokens(tokenizer.Prompt(prompt="The capital of France is"))))
    """
    done = subprocess.run([sys.executable, "-c", program, str(MODEL)], check=True, timeout=300, capture_output=True,
                          text=True)
    assert int(done.stdout) >= 5
