"""What is trained: model, data, loss and how they are cut up over ranks. The same file names in every workload."""
