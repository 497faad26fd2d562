"""From captured tensors to the numbers behind every figure.

One pass over each tensor (`scan`) gives a `summary.TensorSummary`: counts and sums, nothing that grows with the tensor.
Everything else, shares, histograms, layer by site matrices, comparisons, is computed from the table of these summaries.
"""
