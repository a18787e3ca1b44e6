//! Output of the demo: on the terminal, and as plain text into a file.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};

/// The terminal and, if requested, a recording.
pub struct Screen {
    record: Option<File>,
    colour: bool,
}

/// A step in progress.
pub struct RunningStep {
    what: String,
    /// Text that is shown while it runs.
    message: String,
    bar: ProgressBar,
    start: Instant,
}

impl RunningStep {
    /// Shows what the step does now; without a spinner, only if it is `important`.
    pub fn update(&self, now: &str, important: bool) {
        if !self.bar.is_hidden() {
            self.bar.set_message(format!("{}: {now}", self.message));
        } else if important {
            eprintln!("... {now}");
        }
    }
}

impl Screen {
    /// Prints to the terminal, and to `record` too.
    pub fn new(record: Option<&Path>) -> Result<Self> {
        let record = record.map(File::create).transpose()?;
        Ok(Self {
            record,
            colour: std::io::stdout().is_terminal(),
        })
    }

    /// The headline.
    pub fn title(&mut self, text: &str) -> Result<()> {
        self.styled("1", text)?;
        self.line("")
    }

    /// A command that the user could have typed.
    pub fn command(&mut self, text: &str) -> Result<()> {
        self.styled("36", &format!("$ {text}"))
    }

    /// Prints a line.
    pub fn line(&mut self, text: &str) -> Result<()> {
        self.styled("", text)
    }

    /// Prints lines of a program's output, indented.
    pub fn block(&mut self, text: &str) -> Result<()> {
        for line in text.lines() {
            self.line(format!("  {line}").trim_end())?;
        }
        self.line("")
    }

    /// Starts a step, with a spinner on a terminal.
    pub fn begin_step(&mut self, what: &str) -> Result<RunningStep> {
        self.begin_long_step(what, "")
    }

    /// Starts a step that can take long; `hint` says so while it runs.
    pub fn begin_long_step(&mut self, what: &str, hint: &str) -> Result<RunningStep> {
        let message = format!("{what}{hint}");
        let bar = ProgressBar::new_spinner().with_message(message.clone());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        if bar.is_hidden() {
            eprintln!("... {message}");
        }
        Ok(RunningStep {
            what: what.to_owned(),
            message,
            bar,
            start: Instant::now(),
        })
    }

    /// Ends a step: prints its description, its result and its duration.
    pub fn end_step(&mut self, spin: RunningStep, note: &str) -> Result<()> {
        spin.bar.finish_and_clear();
        let RunningStep { what, start, .. } = spin;
        self.line(&format!("[{:>5.1} s] {what}", start.elapsed().as_secs_f64()))?;
        if note.is_empty() {
            return Ok(());
        }
        self.line(&format!("          {note}"))
    }

    /// A progress bar for bytes; it is drawn only on a terminal.
    pub fn byte_progress_bar(&self) -> ProgressBar {
        let bar = ProgressBar::new(0);
        let style =
            "  {wide_bar:.green} {decimal_bytes:>9} of {decimal_total_bytes:>9}  {decimal_bytes_per_sec}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        bar
    }

    fn styled(&mut self, style: &str, text: &str) -> Result<()> {
        if self.colour && !style.is_empty() {
            println!("\x1b[{style}m{text}\x1b[0m");
        } else {
            println!("{text}");
        }
        if let Some(file) = &mut self.record {
            writeln!(file, "{text}")?;
        }
        Ok(())
    }
}
