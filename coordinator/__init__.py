"""The coordinator: speaks the OpenAI API to clients and decides who does what. No torch."""
