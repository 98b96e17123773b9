# SPDX-License-Identifier: Apache-2.0
"""The figures of a run as a page in Markdown."""

ROWS = (
    ("requests", "{requests}: {requests_by_end}"),
    ("prompts that were handed over", "{handed_over}"),
    ("kills and stops", "{kills} and {stops}: {blows_by_kind}"),
    ("control messages that went through the proxy", "{messages}"),
    ("**wrong answers**", "**{wrong_answers}**"),
    ("**unfinished requests**", "**{unfinished}**"),
    ("**leaked blocks**", "**{leaked_blocks}**"),
    ("requests after the last blow", "{afterwards}"),
    ("not at rest afterwards", "{not_at_rest}"),
    ("grown since the calm run", "{grown_since_calm}"),
    ("requests whose D was killed: asked again elsewhere, and right there", "{lost_with_their_d}, "
     "{lost_with_their_d_answered_right_elsewhere} (the others went away)"),
    ("requests that felt a blow, that fell back", "{felt_a_blow}, {fell_back}"),
    ("attempts that fell back, by reason", "{fallbacks_by_reason}"),
    ("of these without a blow to their P: lost messages, the broker", "{fallbacks_without_a_blow_to_p}"),
    ("longest time from a kill to the end of a request that felt it", "{longest_from_kill_to_end_s} s"),
    ("from the kill of a P to D's fallback, s", "{from_kill_of_p_to_fallback_s}"),
    ("from the stop of a P to D's fallback, s (lease: {lease_s} s)", "{from_stop_of_p_to_fallback_s}"),
    ("from a kill to a request's end, s", "{from_kill_to_end_s}"),
    ("from a stop to a request's end, s", "{from_stop_to_end_s}"),
    ("ITL of the calm run, ms", "{itl_calm_ms}"),
    ("ITL of unaffected requests, ms", "{itl_unaffected_ms}"),
    ("time of a request in the calm run, s", "{time_to_end_calm_s}"),
    ("time of a request, s", "{time_to_end_s}"),
    ("start of an engine that replaces a killed one, s", "{engine_start_s}"),
)


def page(figures: dict, command: str, picture: str) -> str:
    """The page. `picture`: the name of the PNG beside it."""
    settings = figures["settings"]
    values = {name: _text(value) for name, value in figures.items()} | {"lease_s": settings["pd"]["lease_s"]}
    rows = "\n".join(f"| {name.format(**values)} | {text.format(**values)} |" for name, text in ROWS)
    return f"""# A run of scripts/lab/chaos.py

    {command}

{settings['decode']} decode and {settings['prefill']} prefill engines with the model {settings['model']}, bursts of \
requests with one blow in
each, {figures['took_s']:.0f} s. Every answer is compared with that of one engine alone. [chaos.json](chaos.json) has \
the settings, the
counters, and each engine's counts at rest, before and after.

| | |
|---|---|
{rows}

![requests in flight, KV blocks and blows over time]({picture})
"""


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
