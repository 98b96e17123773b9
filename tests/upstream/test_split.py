# SPDX-License-Identifier: Apache-2.0
"""B101: our rule for the layers of a stage is vLLM's."""
from vllm.distributed.utils import get_pp_indices

from vllm_pd.transfer.ranks.split import layer_range


def test_b101_layers_go_to_stages_as_in_vllm():
    for stages in range(1, 9):
        for layers in range(stages, 40):
            ours = [layer_range(stage, stages, layers) for stage in range(stages)]
            assert [(each.start, each.stop) for each in ours] == [
                get_pp_indices(layers, stage, stages) for stage in range(stages)]
