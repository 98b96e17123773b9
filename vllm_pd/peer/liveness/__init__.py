# SPDX-License-Identifier: Apache-2.0
"""Whether a peer is dead, as a fact: the processes of this host, TCP probes of lifelines, and the rules for both."""
