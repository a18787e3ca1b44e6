//! Acts on claims.

use std::time::Instant;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Api;
use serde_json::{Value, json};

use crate::cloneset::history::reference;
use crate::cloneset::observe::claim_at;
use crate::cloneset::plan::{ClaimPatch, OrphanClaim};
use crate::cloneset::work::Work;
use crate::view::ClaimView;
use kruise_cluster::{Error, Key, write};

/// Makes a claim. One that is there will do, if it is the CloneSet's and stays.
pub(super) async fn create_claim(work: &Work<'_>, claim: &Value) -> Result<(), Error> {
    let api: Api<PersistentVolumeClaim> = Api::namespaced(work.ctx.cluster.client.clone(), work.namespace());
    match write::post(&api, claim.to_string()).await {
        Ok(stored) => {
            if let Ok(stored) = serde_json::from_value::<PersistentVolumeClaim>(stored) {
                keep_claim(work, &stored);
            }
            Ok(())
        }
        Err(error) if error.already_exists() => {
            let name = claim["metadata"]["name"].as_str().unwrap_or_default();
            let found = look_up_claim(work, name).await?;
            let ours =
                found.is_some_and(|found| found.owner.as_ref() == Some(&work.owner) && !found.claim.deleting);
            if ours { Ok(()) } else { Err(error) }
        }
        Err(error) => Err(error),
    }
}

fn keep_claim(work: &Work<'_>, stored: &PersistentVolumeClaim) {
    let key = Key::of(stored);
    let at = claim_at(&key, &ClaimView::of(stored));
    work.index().claims.wrote(&key, at, Instant::now());
}

/// Reads a claim from the API server itself, and takes note of it.
pub async fn look_up_claim(work: &Work<'_>, name: &str) -> Result<Option<ClaimView>, Error> {
    let found = write::get(&work.api::<PersistentVolumeClaim>(), name).await?;
    let view = found.as_ref().map(ClaimView::of);
    let key = work.key(name);
    let at = view.as_ref().map(|view| claim_at(&key, view));
    work.index().claims.read(&key, at, Instant::now());
    Ok(view)
}

/// Gives a claim another owner.
pub(super) async fn patch_claim(work: &Work<'_>, claim: &ClaimPatch) -> Result<(), Error> {
    let ClaimPatch { name, uid, patch } = claim;
    match write::patch_strategic(&work.api(), name, patch).await {
        Ok(stored) => keep_claim(work, &stored.object()?),
        Err(error) if error.retryable() && !error.conflict() => return Err(error),
        Err(error) => {
            // One that is gone needs no other owner, and another of its name may not get it.
            let found = look_up_claim(work, name).await?;
            if found.is_some_and(|found| found.claim.uid == *uid) {
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Makes claims the CloneSet's that are nobody's, by what the API server itself says of them now.
pub(super) async fn adopt_claims(work: &Work<'_>, claims: &[OrphanClaim]) -> Result<(), Error> {
    for OrphanClaim { name, instance } in claims {
        let Some(found) = look_up_claim(work, name).await? else {
            continue;
        };
        let claim = &found.claim;
        let another_s = found.owner.is_some() || claim.controlled || claim.instance != *instance;
        if another_s || claim.deleting {
            continue;
        }
        let patch = json!({ "metadata": {
            "uid": claim.uid, "resourceVersion": found.resource_version, "ownerReferences": [reference(work.set)],
        } });
        let stored = write::patch_strategic(&work.api(), name, &patch).await?;
        keep_claim(work, &stored.object()?);
    }
    Ok(())
}

/// Deletes a claim.
pub(super) async fn delete_claim(work: &Work<'_>, name: &str, uid: &str) -> Result<(), Error> {
    write::delete(&work.api::<PersistentVolumeClaim>(), name, uid).await?;
    work.index()
        .claims
        .mark_deleted(&work.key(name), uid, Instant::now());
    Ok(())
}
