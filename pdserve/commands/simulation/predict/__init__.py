"""What `simulate` and `plan` share: deployments under a load, scored as `pdserve bench` does."""
