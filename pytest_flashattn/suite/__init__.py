"""The bundled conformance suite: one file a chapter, each test a thin wrapper around a check of the same name."""
