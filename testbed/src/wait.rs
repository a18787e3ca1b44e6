//! Polls for an external state, with a timeout and an error that names what was not reached.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Longer than any successful wait takes on a machine that several test clusters keep busy.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(300);

/// Polls `probe` until it returns a value. Fails after `timeout`, or at once if `probe` fails.
pub fn until<T>(what: &str, timeout: Duration, mut probe: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = probe()? {
            return Ok(value);
        }
        if start.elapsed() > timeout {
            bail!("{what}: not there after {timeout:?}");
        }
        thread::sleep(Duration::from_millis(25));
    }
}
