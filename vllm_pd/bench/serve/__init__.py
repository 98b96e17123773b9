# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench serve`: disaggregated engines against mixed ones, with the same load on the same cores or GPUs.

`traffic` says what is sent and when, `settings` has the command line, `arms` plans what is compared, `fleets` starts
it, `drive` sends the load, `figures` and `comparison` calculate, `report` and `pictures` show, `measure` does it all.
"""
