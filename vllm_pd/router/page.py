# SPDX-License-Identifier: Apache-2.0
"""The page at `/` of the router: a table of the fleet for a browser, which asks for `/fleet` every two seconds.

The page itself holds nothing of the fleet, so it needs no key; `/fleet` does, and the page asks for it in a field. What
comes from engines is put in as text (`textContent`), never as HTML. The content security policy allows this one script
and this one style, by their hashes, and requests to this router only; `require-trusted-types-for` makes the browser
refuse any assignment of HTML.
"""
import base64
import hashlib

from vllm_pd.router.responses import RouterResponse

_STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:1.5em;color:#1b1f24;background:#fff}
h1{font-size:1.2em;margin:0 0 .3em}
p{margin:.3em 0}
table{border-collapse:collapse;margin-top:1em}
th,td{padding:.2em .7em;border-bottom:1px solid #d5d9de;text-align:right;white-space:nowrap}
th{font-weight:600;border-bottom-width:2px}
.word{text-align:left}
.wide{text-align:left;white-space:normal;max-width:34em;overflow-wrap:break-word}
th.wide{white-space:nowrap}
tr.unwell td{background:#fff3e0}
#problem{color:#b3261e}
@media(prefers-color-scheme:dark){body{color:#e3e6ea;background:#16191d}th,td{border-color:#3a4048}
tr.unwell td{background:#43320f}#problem{color:#ff8a80}}
"""

_SCRIPT = """
"use strict";
const PERIOD_MS = 2000, TIMEOUT_MS = 15000;
const percent = v => Math.round(100 * v) + " %";
const count = v => String(Math.round(v));
const figure = v => v === 0 || v >= 100 ? String(Math.round(v)) : v.toPrecision(3);
const seconds = v => v < 1 ? figure(1000 * v) + " ms" : figure(v) + " s";
const text = v => v;
const COLUMNS = [
  ["engine", "engine", text, "word"], ["role", "role", text, "word"], ["url", "at", text, "wide"],
  ["source", "known by", text, "word"], ["models", "models", v => v.join(", "), "wide"],
  ["in_flight", "open", count], ["running", "run", count], ["waiting", "wait", count], ["kv_used", "KV", percent],
  ["parked_blocks", "parked", count], ["fenced_blocks", "fenced", count], ["sending_blocks", "sending", count],
  ["held_blocks", "held", count], ["remote_per_s", "remote/s", figure], ["local_per_s", "local/s", figure],
  ["jobs_per_s", "jobs/s", figure], ["bytes_per_s", "MB/s", v => figure(v / 1e6)],
  ["failed_attempts", "failed", count], ["queue_s", "queue", seconds], ["prefill_s", "prefill", seconds],
  ["transfer_s", "transfer", seconds], ["first_step_s", "first", seconds], ["hit_rate", "hits", percent],
  ["state", "state", text, "word"], ["why", "why", text, "wide"]];
const ALWAYS = new Set(["role", "url", "in_flight", "state"]);
const shown = new Set(ALWAYS);
let key = "", timer = 0, polls = 0;
const at = id => document.getElementById(id);

function add(parent, kind, content, name) {
  const made = document.createElement(kind);
  if (content !== undefined) made.textContent = content;
  if (name) made.className = name;
  parent.append(made);
  return made;
}

function show(fleet) {
  for (const [field] of COLUMNS)
    if (fleet.rows.some(row => row[field] && row[field].length !== 0)) shown.add(field);
  const columns = COLUMNS.filter(([field]) => shown.has(field));
  const head = document.createElement("tr"), rows = [];
  for (const [, title, , name] of columns) add(head, "th", title, name);
  for (const row of fleet.rows) {
    const line = document.createElement("tr");
    if (!row.well) line.className = "unwell";
    for (const [field, , format, name] of columns)
      add(line, "td", row[field] === null ? "-" : format(row[field]), name);
    rows.push(line);
  }
  at("head").replaceChildren(head);
  at("rows").replaceChildren(...rows);
  const well = fleet.rows.filter(row => row.well).length;
  const more = fleet.engines > fleet.rows.length ? `, of which ${fleet.rows.length} are shown` : "";
  at("summary").textContent = `${fleet.engines} engines${more}, ${well} well; policy ${fleet.policy}; ` +
    `${fleet.open_requests} open requests; read at ${new Date().toLocaleTimeString()}`;
  const wrong = [["registry: ", fleet.registry], ["tokenizer: ", fleet.tokenizer],
                 ...Object.values(fleet.discovery).map(problem => ["", problem])]
    .filter(([, problem]) => problem !== "ok" && problem !== "not loaded").map(pair => pair.join(""));
  at("problem").textContent = wrong.join("; ");
}

async function poll() {
  clearTimeout(timer);
  const mine = ++polls;
  let refused = false;
  if (!document.hidden) {
    try {
      const answer = await fetch("fleet", {headers: key ? {Authorization: "Bearer " + key} : {}, cache: "no-store",
                                           signal: AbortSignal.timeout(TIMEOUT_MS)});
      const fleet = answer.ok ? await answer.json() : null;
      if (mine !== polls) return;
      refused = answer.status === 401;
      at("login").hidden = !refused;
      if (fleet) show(fleet);
      else at("problem").textContent = refused ? "This router wants a key." : `The router answers ${answer.status}.`;
    } catch (error) {
      if (mine !== polls) return;
      at("problem").textContent = `The router does not answer (${error}): the table is old.`;
    }
  }
  if (!refused) timer = setTimeout(poll, PERIOD_MS);
}

at("login").addEventListener("submit", event => {
  event.preventDefault();
  if (at("key").value) key = at("key").value;  // the second click of two finds it empty
  at("key").value = "";
  poll();
});
poll();
"""

_PAGE = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>vllm-pd router</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><style>{_STYLE}</style></head>
<body><h1>vllm-pd router</h1><p id="summary"></p><p id="problem"></p>
<form id="login" hidden><label>API key or operator key: <input id="key" type="password" autocomplete="off"></label>
<button>Show</button></form>
<table><thead id="head"></thead><tbody id="rows"></tbody></table>
<noscript><p>This page needs JavaScript. GET /workers has the engines as JSON.</p></noscript>
<script>{_SCRIPT}</script></body></html>
"""


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


_POLICY = (f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; img-src "
           "data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
           "trusted-types 'none'")
PAGE = RouterResponse(200, _PAGE.encode(), [
    (b"content-type", b"text/html; charset=utf-8"), (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"), (b"cache-control", b"no-cache")])
