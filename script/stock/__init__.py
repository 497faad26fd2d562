"""A stock Megatron-LM trainer with this tree's quantisation and capture put into it (`script/instrument.py`)."""
