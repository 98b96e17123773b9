# SPDX-License-Identifier: Apache-2.0
"""V0's asynchronous output processing on the CPU, for tests.

On CUDA it is the default: the output of a step is processed while the device computes the next one. Upstream never uses
it on the CPU. The effect on the engine is the same on both: a step's output is processed one step later.
"""


def switch_on() -> None:
    """Switches it on for every engine that this process builds from now on and that does not switch it off itself."""
    import dataclasses
    from types import SimpleNamespace

    from vllm.platforms.cpu import CpuPlatform
    from vllm.worker import worker_base
    from vllm.worker.cpu_model_runner import CPUModelRunner

    def replace(model_input, **changes):
        """The CPU's model input has no field for the callback."""
        if changes.keys() != {"async_callback"}:
            return dataclasses.replace(model_input, **changes)
        object.__setattr__(model_input, "async_callback", changes["async_callback"])
        return model_input

    execute_model = CPUModelRunner.execute_model

    def call_back_and_execute_model(self, model_input, *arguments, **options):
        callback = getattr(model_input, "async_callback", None)
        if callback is not None:
            callback()
        return execute_model(self, model_input, *arguments, **options)

    CpuPlatform.is_async_output_supported = classmethod(lambda cls, enforce_eager: True)
    worker_base.dataclasses = SimpleNamespace(**{**vars(dataclasses), "replace": replace})
    CPUModelRunner.execute_model = call_back_and_execute_model
