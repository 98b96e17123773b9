# SPDX-License-Identifier: Apache-2.0
"""What the protocol does not need: looked at in a fresh process."""
import subprocess
import sys


def test_core_needs_no_sockets():
    code = ("import sys, vllm_pd.protocol.decode, vllm_pd.protocol.prefill, vllm_pd.decisions.policy; "
            "sys.exit(any(name in sys.modules for name in ('zmq', 'torch', 'vllm', 'numpy', 'socket')))")
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
