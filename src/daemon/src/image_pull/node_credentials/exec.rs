//! Runs a credential provider plugin, or a credential helper: one request on its standard input, one response on its
//! standard output.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use tokio::time::timeout;

/// Time that a plugin has; kubelet's.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum bytes of a response, and of standard error.
const MAX_OUTPUT: u64 = 1 << 20;
/// Bytes of its standard error that are logged.
const MAX_LOGGED: usize = 1024;

/// Why a plugin returned nothing. Contains nothing of its output, which may have secrets.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be started.
    #[error("it cannot be started: {0}")]
    NotStarted(std::io::Error),
    /// Its output cannot be read.
    #[error("its output cannot be read: {0}")]
    Unreadable(std::io::Error),
    /// It ended with an error.
    #[error("it ended with {0}")]
    Failed(ExitStatus),
    /// It wrote too much.
    #[error("its output has more than {MAX_OUTPUT} bytes")]
    TooLong,
    /// It did not end in time.
    #[error("it did not end within {} s", TIMEOUT.as_secs())]
    Timeout,
}

/// A plugin and the processes that it has started; killed when this is dropped. `None` once the plugin has ended:
/// another group may have its number then.
struct ProcessGroup(Option<Pid>);

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            let _ = killpg(group, Signal::SIGKILL);
        }
    }
}

/// Runs a program and returns its output; `name` is for the log, in which `secret` does not appear.
///
/// # Errors
/// See [`Error`]. The program is killed if it has not ended.
pub async fn run(
    mut command: Command,
    name: &str,
    request: &str,
    secret: Option<&str>,
) -> Result<Vec<u8>, Error> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(Error::NotStarted)?;
    let id = child.id().and_then(|id| i32::try_from(id).ok());
    let mut group = ProcessGroup(id.map(Pid::from_raw));
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let communicate = async {
        // A plugin need not read its request.
        if let Some(mut stdin) = stdin {
            let _ = stdin.write_all(request.as_bytes()).await;
        }
        // Reading ends with the limit, so that a flood ends the plugin, too.
        let (output, errors) = tokio::join!(
            read(stdout, MAX_OUTPUT.saturating_add(1)),
            read(stderr, MAX_OUTPUT)
        );
        let output = output.map_err(Error::Unreadable)?;
        if output.len() as u64 > MAX_OUTPUT {
            return Err(Error::TooLong);
        }
        let status = child.wait().await.map_err(Error::Unreadable)?;
        if status.success() {
            return Ok(output);
        }
        let errors = loggable(&errors.unwrap_or_default(), secret);
        tracing::warn!(plugin = name, %status, stderr = errors, "credential provider plugin failed");
        Err(Error::Failed(status))
    };
    let result = timeout(TIMEOUT, communicate).await;
    let result = result.unwrap_or(Err(Error::Timeout));
    if matches!(result, Ok(_) | Err(Error::Failed(_))) {
        group.0 = None;
    }
    result
}

/// The beginning of a standard error, without the secret.
fn loggable(errors: &[u8], secret: Option<&str>) -> String {
    let mut text = String::from_utf8_lossy(errors).into_owned();
    if let Some(secret) = secret.filter(|secret| !secret.is_empty()) {
        text = text.replace(secret, "[secret]");
    }
    text.truncate(text.floor_char_boundary(MAX_LOGGED));
    text
}

/// Reads at most so many bytes.
async fn read(from: Option<impl AsyncRead + Unpin>, limit: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        from.take(limit).read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logged_errors_are_short_and_have_no_secret() {
        let errors = format!("{}: jwt-1 refused, jwt-1", "é".repeat(10));
        let expected = format!("{}: [secret] refused, [secret]", "é".repeat(10));
        assert_eq!(loggable(errors.as_bytes(), Some("jwt-1")), expected);
        let long = format!("x{}jwt-1", "é".repeat(MAX_LOGGED));
        let logged = loggable(long.as_bytes(), None);
        assert_eq!(logged.len(), MAX_LOGGED - 1);
        // The secret is not cut before it is removed.
        let cut = format!("{}jwt-1", "x".repeat(MAX_LOGGED - 2));
        assert!(!loggable(cut.as_bytes(), Some("jwt-1")).contains("jw"));
        assert_eq!(loggable(b"plain", Some("")), "plain");
    }
}
