"""What run_tensor_collection.sh and run_tensor_draw.sh do: prepare, start the trainer, watch it, draw.

| module | subject |
|---|---|
| collection, draw, program | the two programs, and what they share |
| flags, options | the table of flags; one record of what was asked for |
| environment | going over to the Python environment that script/setup_env.sh names |
| inputs, preparation | what a checkpoint, tokenizer or data path holds; turning it into what the trainer reads |
| plan | files and bytes that a micro-batch will take |
| trainer | the trainer's command line |
| process, watch, display | running it in its own process group; what it has written so far; showing that |
| training, summary | one run from start to end; what is said before and after it |

The driver itself never imports torch: it stays small beside the training that it watches.
"""
