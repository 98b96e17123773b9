# SPDX-License-Identifier: Apache-2.0
"""How the patched ``vllm`` wheel and the environment around it are made.

Everything here runs on the standard library of Python 3.11, before any package is installed. Modules, each one noun:

    cache       one folder, pieces named by a hash of what they are made from, complete or absent
    process     commands run quietly, and the one error
    project     this repository's own settings (``[tool.vllm-pd]`` in pyproject.toml) and versions
    source      the pinned upstream tree, plain and with the series applied
    metadata    METADATA, WHEEL, entry points and ``_version.py`` of our wheels
    archive     deterministic wheel files with a correct RECORD
    extension   the compiled CPU extension ``vllm/_C.abi3.so``
    targets     the wheels: ``cpu`` (from source) and ``cuda`` (from the official wheel)
    plugin      the wheel ``plugin``, for a stock vLLM
"""
