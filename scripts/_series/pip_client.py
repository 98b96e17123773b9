# SPDX-License-Identifier: Apache-2.0
"""Download one sdist with pip's own finder and session. Run as a script by an interpreter that has pip.

`pip download` would also run the package's build back end, which for vLLM wants torch. The finder and the session below
are what `pip download` itself uses, so every setting of the user's pip holds: index, extra indexes, certificates,
proxy, netrc, find-links.

    python pip_client.py PROJECT VERSION OUT      writes OUT, prints {"url": ..., "sha256": ... or null}
"""
import json
import sys

from pip._internal.commands import create_command


def main(project: str, version: str, out: str) -> int:
    command = create_command("download")
    options, _ = command.parse_args([f"{project}=={version}"])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session, ignore_requires_python=True)
        links = [found.link for found in finder.find_all_candidates(project)
                 if str(found.version) == version and not found.link.is_wheel
                 and found.link.filename.endswith(".tar.gz")]
        if not links:
            print(f"the package index has no source distribution of {project} {version}", file=sys.stderr)
            return 1
        link = links[0]
        response = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
        response.raise_for_status()
        with open(out, "wb") as sink:
            for chunk in response.iter_content(1 << 20):
                sink.write(chunk)
    print(json.dumps({"url": link.url_without_fragment, "sha256": link.hash if link.hash_name == "sha256" else None}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
