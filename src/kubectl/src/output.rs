//! Tables, JSON and lines; colours on a terminal.
//!
//! Everything that is printed passes through [`printable`] here, so that no text of an object can control a terminal.

use std::fmt::Write as _;
use std::future::pending;
use std::io::{self, ErrorKind, IsTerminal, Write as _};
use std::sync::OnceLock;

use kruise_api::text::{printable, printable_json};
use serde::Serialize;
use tokio::io::Interest;
use tokio::net::unix::pipe;

use super::error::Error;

/// How the result is printed.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One JSON document
    Json,
}

/// The option of commands with a result for programs.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct OutputOptions {
    /// Format of the output; tables when absent
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub output: Option<Format>,
}

/// How a cell is coloured on a terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    /// Not at all.
    #[default]
    Plain,
    /// All is well.
    Good,
    /// It is not finished.
    Pending,
    /// It failed.
    Bad,
}

/// A cell of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    /// A cell in colour.
    pub fn toned(text: impl Into<String>, tone: Tone) -> Self {
        let text = text.into();
        Self { text, tone }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::toned(text, Tone::Plain)
    }
}

/// Between the columns.
const GAP: &str = "   ";

/// A table with aligned columns, as kubectl prints it. Cells without text are `-`.
pub fn table<const N: usize>(header: [&str; N], rows: &[[Cell; N]], colours: bool) -> String {
    let shown = |cell: &Cell| match cell.text.as_str() {
        "" => "-".to_owned(),
        text => printable(text),
    };
    let mut widths = header.map(str::len);
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(shown(cell).chars().count());
        }
    }
    let mut text = String::new();
    let header = header.map(Cell::from);
    for row in std::iter::once(&header).chain(rows) {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            let last = column + 1 == N;
            let shown = shown(cell);
            let padding = if last { 0 } else { width - shown.chars().count() };
            // Writing into a String cannot fail.
            let _ = write!(
                line,
                "{}{}",
                paint(&shown, cell.tone, colours),
                " ".repeat(padding)
            );
            if !last {
                line.push_str(GAP);
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// The text in its colour.
pub fn paint(text: &str, tone: Tone, colours: bool) -> String {
    let styled = console::style(text).force_styling(colours);
    match tone {
        Tone::Plain => text.to_owned(),
        Tone::Good => styled.green().to_string(),
        Tone::Pending => styled.yellow().to_string(),
        Tone::Bad => styled.red().to_string(),
    }
}

/// The parts that could not be read, with their errors; empty if there are none.
pub fn unread(errors: &[String], colours: bool) -> String {
    let mut text = String::new();
    if !errors.is_empty() {
        text.push_str("\nCould not be read:\n");
    }
    for error in errors {
        let _ = writeln!(text, "{}", paint(&printable(error), Tone::Bad, colours));
    }
    text
}

/// Whether standard output is in colour: a terminal, and neither `NO_COLOR` nor a dumb terminal.
pub fn colours() -> bool {
    io::stdout().is_terminal() && console::Term::stdout().features().colors_supported()
}

/// A document as JSON that is safe for a terminal.
pub fn json(document: &impl Serialize) -> String {
    printable_json(&serde_json::to_string_pretty(document).unwrap_or_default())
}

/// Why the first text was lost that could not be printed.
static WRITE_ERROR: OnceLock<String> = OnceLock::new();

/// Prints a text whose parts are printable already. A failure does not stop the command, whose work goes on; see
/// [`write_error`].
pub fn print(text: &str) {
    if let Err(error) = print_while_read(text) {
        // A later error is the same one.
        let _ = WRITE_ERROR.set(error.to_string());
    }
}

/// Why output was lost, if it was; a closed reader has read enough.
pub fn write_error() -> Option<&'static str> {
    WRITE_ERROR.get().map(String::as_str)
}

/// Prints such a text for a command that goes on until nothing reads it; returns whether it is still read.
pub fn print_while_read(text: &str) -> Result<bool, Error> {
    match write_stdout(text) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Error::Failed(format!("cannot write: {error}"))),
    }
}

fn write_stdout(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// The pipe that standard output is, to be opened while it has a reader; `None` if it is no pipe, or not on Linux.
pub fn stdout_pipe() -> Option<pipe::Sender> {
    pipe::OpenOptions::new().open_sender("/proc/self/fd/1").ok()
}

/// Returns when nothing reads the pipe any more. Without a pipe it never returns: only the next write shows it.
pub async fn reader_closed(pipe: Option<pipe::Sender>) {
    match pipe {
        Some(pipe) => drop(pipe.ready(Interest::ERROR).await),
        None => pending().await,
    }
}

/// Prints a line.
pub fn print_line(line: &str) {
    print(&format!("{}\n", printable(line)));
}

/// Prints a line on standard error.
pub fn print_note(line: &str) {
    let _ = writeln!(io::stderr(), "{}", printable(line));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json as value};

    #[test]
    fn columns_are_aligned() {
        let rows = [
            ["a".into(), Cell::toned("Failed", Tone::Bad), "x".into()],
            ["long".into(), "".into(), "".into()],
        ];
        assert_eq!(
            table(["NAME", "STATE", "MESSAGE"], &rows, false),
            "NAME   STATE    MESSAGE\na      Failed   x\nlong   -        -\n"
        );
        let coloured = table(["NAME", "STATE", "MESSAGE"], &rows, true);
        assert!(coloured.contains("\u{1b}[31mFailed\u{1b}[0m   x"), "{coloured:?}");
    }

    #[test]
    fn json_escapes_are_those_of_json() {
        let document = value!({ "message": "a\u{1b}\u{9b}\u{7f}\u{202e}\nü" });
        let text = json(&document);
        assert!(text.contains("a\\u001b\\u009b\\u007f\\u202e\\nü"), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), document);
    }

    proptest! {
        /// Whatever a tenant writes: nothing but the lines and colours of the table reaches the terminal.
        #[test]
        fn foreign_text_cannot_control_the_terminal(name in ".*", message in any::<String>()) {
            let text = table(["A", "B"], &[[name.clone().into(), Cell::toned(&*message, Tone::Bad)]], false);
            prop_assert_eq!(text.lines().count(), 2);
            prop_assert!(text.replace('\n', "").chars().all(|c| !c.is_control()));
            let document = value!({ "name": name, "message": message });
            let text = json(&document);
            prop_assert!(text.replace('\n', "").chars().all(|c| !c.is_control()));
            prop_assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), document);
        }
    }
}
