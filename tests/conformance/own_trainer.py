"""pytest plugin: what a test imports from transformers as Trainer and TrainingArguments is this package's."""

import transformers

import optimum_trn

transformers.Trainer = optimum_trn.NeuronTrainer
transformers.TrainingArguments = optimum_trn.NeuronTrainingArguments
transformers.Seq2SeqTrainer = optimum_trn.NeuronSeq2SeqTrainer
transformers.Seq2SeqTrainingArguments = optimum_trn.NeuronSeq2SeqTrainingArguments
