"""What measures parts of the coordinator. It is here since `pdserve.bench` is a floor below."""
