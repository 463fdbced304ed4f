# Figures, claims and report of a results folder. RESULTS=results/h200 for the committed ones.
RESULTS ?= outputs
FIGURES ?= outputs/figures
REPORT ?= outputs/report/report.html
.PHONY: figures verify-claims report readme-tables aims

figures: $(STAMP)  ## redraw every figure and table that RESULTS has data for
	$(BIN)/python -m figures --results $(RESULTS) --out $(FIGURES)

verify-claims: $(STAMP)  ## every claim of the paper against RESULTS: verdict, both values, interval
	$(BIN)/python -m harness.claims --results $(RESULTS) --out outputs/claims.json

aims: $(STAMP)  ## summaries and efficiency of every run below RESULTS, the aims that records answer, all aims in one table
	$(BIN)/python -m harness.closing $(RESULTS)
	$(BIN)/python -m harness.aims $(RESULTS)

readme-tables: $(STAMP)  ## fill the README's tables and figures from results/h200
	$(BIN)/python -m figures.markdown --results results/h200 --update README.md

report: $(STAMP)  ## one offline HTML file: claims, figures, tables, environment, efficiency
	$(BIN)/python -m harness.report --results $(RESULTS) --out $(REPORT)
