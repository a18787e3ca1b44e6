//! The images that every bed's registry holds at its start.

use anyhow::Result;

use super::cache::Cache;

pub(super) fn current(cache: &Cache) -> bool {
    cache.registry_seed().is_dir()
}

pub(super) fn seed(_cache: &Cache) -> Result<()> {
    Ok(())
}
