//! The output: bars on a terminal, lines elsewhere, and the result.

use std::collections::HashMap;
use std::io::{self, Write};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::outcome::{Error, PullOutcome};
use crate::image_pull::plan::{PullProgress, TagKey};
use kruise_api::text::{printable, printable_json};

const SPINNER_TEMPLATE: &str = "{spinner} {prefix}  {elapsed}  {msg}";
const PROGRESS_TEMPLATE: &str =
    "{spinner} {prefix}  [{bar:30}] {bytes}/{total_bytes}  {binary_bytes_per_sec}  {eta} left  {msg}";

/// Shows progress on standard error, and with text output each result on standard output.
pub(super) struct ProgressView {
    bars: Option<MultiProgress>,
    text: bool,
    bars_by_tag: HashMap<TagKey, ProgressBar>,
}

impl ProgressView {
    /// With progress bars, or with plain lines.
    pub(super) fn new(bars: bool, text: bool) -> Self {
        Self {
            bars: bars.then(MultiProgress::new),
            text,
            bars_by_tag: HashMap::new(),
        }
    }

    /// Shows the start of an attempt.
    pub(super) fn attempt_started(&mut self, key: &TagKey, image: &str) {
        let Some(bars) = &self.bars else {
            print_stderr(&format!("{image}: pulling"));
            return;
        };
        let bar = self
            .bars_by_tag
            .entry(key.clone())
            .or_insert_with(|| bars.add(ProgressBar::new_spinner()));
        bar.set_style(style(SPINNER_TEMPLATE));
        bar.set_prefix(printable(image));
        bar.set_message("");
        bar.enable_steady_tick(Duration::from_millis(200));
    }

    /// Shows the progress of an attempt.
    pub(super) fn progress(&self, key: &TagKey, progress: PullProgress) {
        let Some(bar) = self.bars_by_tag.get(key) else {
            return;
        };
        if bar.length() != Some(progress.total) {
            bar.set_style(style(PROGRESS_TEMPLATE));
            bar.set_length(progress.total);
        }
        bar.set_position(progress.done);
        bar.set_message(if progress.done < progress.total {
            ""
        } else {
            "unpacking"
        });
    }

    /// Shows a failed attempt that will be retried.
    pub(super) fn retrying(&self, key: &TagKey, image: &str, error: &str) {
        match self.bars_by_tag.get(key) {
            Some(bar) => bar.set_message(format!("again soon: {}", printable(error))),
            None => print_stderr(&format!("{image}: again soon: {error}")),
        }
    }

    /// Shows the result of an image; `line` is its text.
    pub(super) fn finished(&mut self, key: &TagKey, line: &str) {
        if let Some(bar) = self.bars_by_tag.remove(key) {
            bar.finish_and_clear();
        }
        match &self.bars {
            Some(bars) => bars.suspend(|| print_stdout(line)),
            None if self.text => print_stdout(line),
            None => print_stderr(line),
        }
    }

    /// Removes the bars at the end.
    pub(super) fn clear(&self) {
        if let Some(bars) = &self.bars {
            // A closed terminal is not a failure.
            let _ = bars.clear();
        }
    }
}

/// Prints a line on standard output whose parts are printable already. A closed reader does not stop the command: the
/// images are still needed.
pub(super) fn print_stdout(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// Prints on standard error. Names in a manifest and errors of a registry are not ours.
pub(super) fn print_stderr(line: &str) {
    let _ = writeln!(io::stderr(), "{}", printable(line));
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// One image's result as a line.
pub(super) fn result_line(outcome: &PullOutcome) -> String {
    let PullOutcome {
        image,
        succeeded,
        already_present: present,
        image_id,
        message,
        attempts: _,
        seconds,
    } = outcome;
    let id = image_id.as_deref().unwrap_or_default();
    let image = printable(image);
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

/// A JSON document as a line that is safe for a terminal.
pub(super) fn json_line(document: &Value) -> String {
    printable_json(&document.to_string())
}

/// All results as one JSON document.
pub(super) fn results_json(outcomes: &[PullOutcome]) -> Value {
    let images: Vec<_> = outcomes
        .iter()
        .map(|o| {
            json!({
                "image": o.image,
                "succeeded": o.succeeded,
                "alreadyPresent": o.already_present,
                "imageID": o.image_id,
                "message": o.message,
                "attempts": o.attempts,
                "seconds": (o.seconds * 1000.0).round() / 1000.0,
            })
        })
        .collect();
    json!({ "succeeded": outcomes.iter().all(|o| o.succeeded), "images": images })
}

/// The error as a JSON document of the same shape.
pub(super) fn error_json(error: &Error) -> Value {
    json!({ "succeeded": false, "images": [], "error": error.to_string(), "reason": error.category() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_cannot_control_the_terminal() {
        let outcome = PullOutcome {
            image: "nginx\u{1b}[2J".to_owned(),
            succeeded: false,
            already_present: false,
            image_id: None,
            message: Some("denied\u{9b}2J".to_owned()),
            attempts: 1,
            seconds: 0.0,
        };
        let line = result_line(&outcome);
        assert_eq!(line, r"nginx\u{1b}[2J: FAILED: denied\u{9b}2J");
        let document = results_json(&[outcome]);
        let line = json_line(&document);
        assert!(line.contains(r"denied\u009b2J"), "{line}");
        assert_eq!(serde_json::from_str::<Value>(&line).ok(), Some(document));
    }
}
