//! Rows on binary size, startup, memory, and processor time without work.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::rows::Figures;
use crate::side::Side;
use crate::usage::{cpu, memory};

/// Time without work: `/proc` counts in hundredths of a second.
const IDLE_TIME: Duration = Duration::from_secs(60);

pub fn start(side: &Side, figures: &mut Figures) -> Result<()> {
    figures.daemon_start = Some(side.daemon_start);
    figures.daemon_size = Some(side.sizes.0);
    figures.manager_size = Some(side.sizes.1);
    Ok(())
}

/// Resident memory, and the daemon's processor time, without any work.
pub async fn idle(side: &Side, figures: &mut Figures) -> Result<()> {
    tokio::time::sleep(Duration::from_secs(10)).await;
    figures.daemon_rss = Some(memory(side, side.daemon, "VmRSS")?);
    figures.daemon_anonymous = Some(memory(side, side.daemon, "RssAnon")?);
    figures.manager_rss = Some(memory(side, side.manager, "VmRSS")?);
    let (start, used) = (Instant::now(), cpu(side, side.daemon)?);
    tokio::time::sleep(IDLE_TIME).await;
    let used = cpu(side, side.daemon)?.saturating_sub(used);
    figures.daemon_idle = Some(used.as_secs_f64() / start.elapsed().as_secs_f64());
    Ok(())
}
