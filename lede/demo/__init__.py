"""The bundled early-exit model: how it was trained, and a tour of lede on it."""
