"""From a target checkpoint to an INT4 draft folder: calibration, layer loop, GPTQ, files."""
