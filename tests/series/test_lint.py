# SPDX-License-Identifier: Apache-2.0
"""What a patch must say about itself: one good patch, and one fault at a time."""
import pytest
from _series import lint
from _series.patch import TRAILERS, from_message, parse

from .conftest import PROSE, message

SUBJECT = "sched: park a prompt"
DIFF = "diff --git a/vllm/a.py b/vllm/a.py\n--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-a = 1\n+a = 2\n"
AUTHOR = "Some One <one@example.org>"


def faults(text: str = message(SUBJECT), diff: str = DIFF, author: str = AUTHOR) -> str:
    return "\n".join(lint.problems(from_message(author, text, diff), ["fix-one.patch", "fix-two.patch"]))


def test_good():
    """The patch that the other tests spoil has no fault."""
    assert faults() == ""
    assert faults(message(SUBJECT, Depends_On="fix: one; fix-two.patch")) == ""


@pytest.mark.parametrize("key", TRAILERS)
def test_missing_trailer(key):
    """B52: each trailer is asked for by name, missing or without a value."""
    assert f"trailer {key}: is missing" in faults(message(SUBJECT, **{key: None}))
    assert f"trailer {key}: has no value yet" in faults(message(SUBJECT, **{key: ""}))
    assert f"trailer {key}: has no value yet" in faults(message(SUBJECT, **{key: "TODO"}))


@pytest.mark.parametrize("subject, said", [
    ("park a prompt", "must begin with one of the areas"),
    ("scheduler: park a prompt", "must begin with one of the areas"),
    ("sched: parks a prompt", "must be imperative"),
    ("sched: parked a prompt", "must be imperative"),
    ("sched: parking a prompt", "must be imperative"),
    ("sched: Park a prompt", "must be imperative"),
    ("sched: park a prompt.", "without a full stop"),
    ("sched: park a prompt " + "x" * 60, "at most 72"),
    ("sched: park a prömpt", "ASCII"),
])
def test_subject(subject, said):
    """B52: the subject has its area and is imperative."""
    assert said in faults(message(subject))


@pytest.mark.parametrize("subject", ["sched: pass a prompt", "sched: feed a prompt", "sched: address a prompt"])
def test_subject_that_only_looks_wrong(subject):
    assert faults(message(subject)) == ""


@pytest.mark.parametrize("prose", ["Short.", f"{PROSE}\n---\nmore", f"{PROSE}\ndiff --git a/x b/x",
                                   f"{PROSE}\nFrom: me"])
def test_body(prose):
    """B52: a body says why, and has no line at which git am would cut it."""
    assert "body" in faults(message(SUBJECT, prose))


def test_trailers_in_the_wrong_place_or_order():
    """B52: trailers are the last paragraph, in their order, with nothing between them."""
    head, _, tail = message(SUBJECT).rpartition("\n\n")
    assert "is missing" in faults(f"{head}\n\n{tail}\nAnd one more thing.")
    assert "order" in faults("\n\n".join([head, "\n".join(reversed(tail.strip().splitlines()))]))
    assert "Kind: must be one of" in faults(message(SUBJECT, Kind="feature"))
    assert "Depends-On: must be" in faults(message(SUBJECT, Depends_On="fix: three"))


def test_long_trailer():
    """A trailer may go on in lines that begin with a space."""
    patch = from_message(AUTHOR, message(SUBJECT, Used_By="one thing;\n another thing"), DIFF)
    assert patch.trailers["Used-By"] == "one thing; another thing"
    assert faults(patch.message) == ""


@pytest.mark.parametrize("header, said", [
    ("new file mode 100644\n", "adds a file"), ("deleted file mode 100644\n", "deletes a file"),
    ("old mode 100644\nnew mode 100755\n", "changes a mode"), ("rename from vllm/b.py\n", "renames a file"),
    ("Binary files a/x and b/x differ\n", "changes a binary file"), ("index 1..2 100644\n", "index line"),
])
def test_diff_that_does_more_than_change_lines(header, said):
    """B52: no new files under upstream's folders, no moves, nothing binary."""
    first, _, rest = DIFF.partition("\n")
    assert said in faults(diff=f"{first}\n{header}{rest}")


def test_empty_diff():
    assert "has no diff" in faults(diff="")


@pytest.mark.parametrize("kind, line, said", [
    ("seam", "from vllm_pd.v0 import hooks", "must not name vllm_pd"),
    ("fix", "# for vllm_pd", "must not name vllm_pd"),
    ("hook", "from vllm_pd.decisions import policy", "only through vllm_pd.v0.hooks"),
    ("hook", "from vllm_pd.v0 import hooks", ""),
    ("queue", "    vllm_pd.v0.hooks.admit(self)", ""), ("hook", "import vllm_pd", "only through vllm_pd.v0.hooks"),
])
def test_own_package_in_upstream(kind, line, said):
    """B52: a seam never names vllm_pd, a hook reaches only vllm_pd.v0.hooks."""
    found = faults(message(SUBJECT, Kind=kind), DIFF.replace("+a = 2", "+" + line))
    assert said in found and bool(said) == bool(found)


def test_white_space():
    assert "white space" in faults(diff=DIFF.replace("+a = 2", "+a = 2 "))


def test_author():
    assert "author" in faults(author="nobody")


def test_removed_line_that_looks_like_a_header():
    """Counting is by hunks: a removed `-- a/x` is a line, not a file."""
    patch = from_message(AUTHOR, message(SUBJECT), DIFF.replace("-a = 1", "--- a/vllm/b.py"))
    assert patch.removed() == ["-- a/vllm/b.py"]
    assert patch.paths == ["vllm/a.py"]


def test_text_survives():
    """B51: form feeds, carriage returns and bytes that are no UTF-8 come through parse and render."""
    diff = DIFF.replace("+a = 2", "+a = '\x0c\u2028\r\udcff'")
    patch = from_message(AUTHOR, message(SUBJECT), diff)
    assert parse(patch.render(), "x") == patch
