# Sweeps: cells of conf/sweep. ARGS='model=phimoe_mini prompts=1' overrides any axis; PROFILE=paper takes the paper's sizes.
MEMORY ?=
.PHONY: depth-sweep prefix-sweep baselines kick-tires

depth-sweep: $(STAMP)  ## TPOT against K; writes the chosen K that main-run and baselines use (figure 7)
	$(BIN)/python run.py sweep=depth profile=$(PROFILE) $(if $(MEMORY),memory=$(MEMORY)) $(ARGS)

prefix-sweep: $(STAMP)  ## TPOT and TTFT against the prefix length
	$(BIN)/python run.py sweep=prefix profile=$(PROFILE) $(if $(MEMORY),memory=$(MEMORY)) $(ARGS)

baselines: $(STAMP)  ## Specter, SpecMoEOff and MO-SM; MEMORY=high or low for one setting
	$(BIN)/python run.py sweep=baselines profile=$(PROFILE) $(if $(MEMORY),memory=$(MEMORY)) $(ARGS)

kick-tires: $(STAMP)  ## ten minutes on a CPU: every system, sweep (tiny), figure, claim and the report
	$(BIN)/python scripts/kick_tires.py
