# Installation and release.
.PHONY: doctor install

doctor:  ## what this machine has, and what each missing thing disables
	@$(PYTHON) scripts/doctor.py

install:  ## .venv with the release's supplied wheels first, after their hashes were checked (WHEELS=DIR)
	bash initialization/install.sh --python $(PYTHON) --venv $(VENV) $(if $(WHEELS),--wheels $(WHEELS))
