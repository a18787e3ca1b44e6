//! What the user sees: bars on a terminal, lines elsewhere, and the result.

use std::collections::HashMap;
use std::io::{self, Write};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde_json::json;

use super::outcome::{Error, Outcome};
use crate::control::printable;
use crate::image_pull::plan::{Progress, TagKey};

const SPIN: &str = "{spinner} {prefix}  {elapsed}  {msg}";
const BYTES: &str =
    "{spinner} {prefix}  [{bar:30}] {bytes}/{total_bytes}  {binary_bytes_per_sec}  {eta} left  {msg}";

/// Shows progress on standard error, and each result on standard output if that is to be text.
pub(super) struct View {
    bars: Option<MultiProgress>,
    text: bool,
    shown: HashMap<TagKey, ProgressBar>,
}

impl View {
    /// With bars, or with plain lines.
    pub(super) fn new(bars: bool, text: bool) -> Self {
        Self {
            bars: bars.then(MultiProgress::new),
            text,
            shown: HashMap::new(),
        }
    }

    /// An attempt begins.
    pub(super) fn begin(&mut self, key: &TagKey, image: &str) {
        let Some(bars) = &self.bars else {
            remark(&format!("{image}: pulling"));
            return;
        };
        let bar = self
            .shown
            .entry(key.clone())
            .or_insert_with(|| bars.add(ProgressBar::new_spinner()));
        bar.set_style(style(SPIN));
        bar.set_prefix(image.to_owned());
        bar.set_message("");
        bar.enable_steady_tick(Duration::from_millis(200));
    }

    /// Bytes have come.
    pub(super) fn bytes(&self, key: &TagKey, progress: Progress) {
        let Some(bar) = self.shown.get(key) else { return };
        if bar.length() != Some(progress.total) {
            bar.set_style(style(BYTES));
            bar.set_length(progress.total);
        }
        bar.set_position(progress.done);
        bar.set_message(if progress.done < progress.total {
            ""
        } else {
            "unpacking"
        });
    }

    /// An attempt failed, and there will be another.
    pub(super) fn again(&self, key: &TagKey, image: &str, error: &str) {
        match self.shown.get(key) {
            Some(bar) => bar.set_message(format!("again soon: {}", printable(error))),
            None => remark(&format!("{image}: again soon: {}", printable(error))),
        }
    }

    /// An image is over; `line` says how.
    pub(super) fn over(&mut self, key: &TagKey, line: &str) {
        if let Some(bar) = self.shown.remove(key) {
            bar.finish_and_clear();
        }
        match &self.bars {
            Some(bars) => bars.suspend(|| result(line)),
            None if self.text => result(line),
            None => remark(line),
        }
    }

    /// Everything is over.
    pub(super) fn end(&self) {
        if let Some(bars) = &self.bars {
            // A terminal that has gone is no reason to fail.
            let _ = bars.clear();
        }
    }
}

/// Prints on standard output. That nobody reads it is no reason to stop: the images are wanted all the same.
pub(super) fn result(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// Prints on standard error.
pub(super) fn remark(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// One image's result in a line.
pub(super) fn line(outcome: &Outcome) -> String {
    let Outcome {
        image,
        succeeded,
        present,
        image_id,
        message,
        attempts: _,
        seconds,
    } = outcome;
    let id = image_id.as_deref().unwrap_or_default();
    let message = message.as_deref().map(printable);
    let note = message
        .as_deref()
        .map_or_else(String::new, |m| format!("  ({m})"));
    match (succeeded, present) {
        (true, true) => format!("{image}: already on the node  {id}{note}"),
        (true, false) => format!("{image}: pulled in {seconds:.1} s  {id}{note}"),
        (false, _) => format!(
            "{image}: FAILED: {}",
            message.as_deref().unwrap_or("unknown error")
        ),
    }
}

/// All results as one document.
pub(super) fn json(outcomes: &[Outcome]) -> serde_json::Value {
    let images: Vec<_> = outcomes
        .iter()
        .map(|o| {
            json!({
                "image": o.image,
                "succeeded": o.succeeded,
                "alreadyPresent": o.present,
                "imageID": o.image_id,
                "message": o.message,
                "attempts": o.attempts,
                "seconds": (o.seconds * 1000.0).round() / 1000.0,
            })
        })
        .collect();
    json!({ "succeeded": outcomes.iter().all(|o| o.succeeded), "images": images })
}

/// Why nothing was pulled, as a document of the same shape.
pub(super) fn error_json(error: &Error) -> serde_json::Value {
    json!({ "succeeded": false, "images": [], "error": error.to_string(), "reason": error.category() })
}
