# SPDX-License-Identifier: Apache-2.0
"""What stands before an application that serves HTTP: limits for clients, access, an engine's routes and its drain."""
