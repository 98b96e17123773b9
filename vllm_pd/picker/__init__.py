# SPDX-License-Identifier: Apache-2.0
"""The router's judgement as an endpoint picker for Envoy and other gateways: docs/picker.md."""
