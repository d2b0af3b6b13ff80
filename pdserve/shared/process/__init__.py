"""What every process of pdserve has to do with Python and the system it runs on."""
