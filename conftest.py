"""This repository's own test runs: pytester for the tests of the plugin."""

pytest_plugins = ["pytester"]
