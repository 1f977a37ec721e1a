"""Where the pixels of a pipeline are computed: workers or device."""
