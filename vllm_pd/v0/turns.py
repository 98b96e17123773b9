# SPDX-License-Identifier: Apache-2.0
"""When a step takes no prefills, so that a group whose prompt came from a peer gets its first token."""


class DecodeTurns:
    """Without chunked prefill, V0 runs a step of prefills whenever it can, and decodes only otherwise. After a group
    has resumed, one step takes no prefills. Two such steps never follow each other, so that new prompts are not delayed
    for long."""

    def __init__(self) -> None:
        self._resumed = False  # and has had no step of decodes since
        self.held = False  # whether the last step took no prefills for this reason

    def resume(self) -> None:
        """A group goes on with the next step."""
        self._resumed = True

    def allows_prefills(self) -> bool:
        """Whether the step that is being scheduled may take prefills. To be called once a step."""
        self.held = self._resumed and not self.held
        return not self.held

    def scheduled(self, num_prefill_groups: int) -> None:
        """The step is scheduled with so many prefills."""
        if not num_prefill_groups:
            self._resumed = False
