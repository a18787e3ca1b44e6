//! Structured logs on standard error, filtered by `RUST_LOG`.

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// One line of text with `key=value` fields.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging; `RUST_LOG` chooses what (default `info`). A second call does nothing.
pub fn init(format: Format) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    let _ = match format {
        Format::Text => builder
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
            .try_init(),
        Format::Json => builder.json().flatten_event(true).try_init(),
    };
}
