"""Datasets, tokenizers and batches: from texts or files of tokens to training samples.

    token files     indexed ---------------> packing -> stream
    conversations   prepare.instructions -> packing -> stream
    text            finding -> inputs, tables -> documents -> tokenizers -> packed_source -> text_stream

`sources` opens what a configuration names, `order` decides which sample comes when, and `loader` makes a `batch` of the
samples. Readers of text belong to the core, because data=stream reads text during training.
"""
