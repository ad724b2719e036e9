"""What the optimizers stand on. It knows neither of them, nor a trainer."""
