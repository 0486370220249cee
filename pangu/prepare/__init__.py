"""Preparation of corpora: from text and conversations to files of tokens, in parallel and resumable.

`preprocessing` serves tools/preprocess_data.py. `corpora` makes what data=stdlib and data=instructions need, on the
first process of a run: `stdlib`, and `instructions` with chat templates (`messages`, `chat`, `sandbox`).
"""
