"""Planning: which schedule, partition and number of microbatches make a model's step fastest on given machines."""
