//! Rows on binary size, startup and memory.

use std::time::Duration;

use anyhow::Result;

use crate::rows::Figures;
use crate::side::Side;
use crate::usage::memory;

pub fn start(side: &Side, figures: &mut Figures) -> Result<()> {
    figures.daemon_start = Some(side.daemon_start);
    figures.daemon_size = Some(side.sizes.0);
    figures.manager_size = Some(side.sizes.1);
    Ok(())
}

/// Resident memory without any work.
pub async fn idle(side: &Side, figures: &mut Figures) -> Result<()> {
    tokio::time::sleep(Duration::from_secs(10)).await;
    figures.daemon_rss = Some(memory(side, side.daemon, "VmRSS")?);
    figures.daemon_anonymous = Some(memory(side, side.daemon, "RssAnon")?);
    figures.manager_rss = Some(memory(side, side.manager, "VmRSS")?);
    Ok(())
}
