//! Actions on PersistentVolumeClaims.

use std::time::Instant;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Api;
use serde_json::{Value, json};

use crate::cloneset::context::CloneSetContext;
use crate::cloneset::fetch::fetch_claim;
use crate::cloneset::observe::versioned_claim;
use crate::cloneset::plan::{Action, ClaimPatch, OrphanClaim};
use crate::view::ClaimView;
use kruise_cluster::write_cache::Written;
use kruise_cluster::{Error, Key, write};

/// Creates a claim. An existing one is accepted if the CloneSet owns it and it is not terminating.
pub(super) async fn create_claim(ctx: &CloneSetContext<'_>, claim: &Value) -> Result<(), Error> {
    let api: Api<PersistentVolumeClaim> =
        Api::namespaced(ctx.manager.cluster.client.clone(), ctx.namespace());
    match write::create_raw(&api, claim.to_string()).await {
        Ok(stored) => {
            if let Ok(stored) = serde_json::from_value::<PersistentVolumeClaim>(stored) {
                cache_claim(ctx, &stored, Written::Created);
            }
            Ok(())
        }
        Err(error) if error.already_exists() => {
            let name = claim["metadata"]["name"].as_str().unwrap_or_default();
            let found = fetch_claim(ctx, name).await?;
            let ours = found
                .is_some_and(|found| found.owner.as_ref() == Some(&ctx.owner) && !found.claim.terminating);
            if ours { Ok(()) } else { Err(error) }
        }
        Err(error) => Err(error),
    }
}

/// Whether claims that are not the CloneSet's have names of the Pod's new claims, as far as they are cached. The name of a
/// terminating one is free later.
pub(super) fn has_foreign_claim(ctx: &CloneSetContext<'_>, action: &Action) -> bool {
    let Action::CreatePod { claims, .. } = action else {
        return false;
    };
    let index = ctx.index();
    claims.iter().any(|claim| {
        let key = ctx.key(claim["metadata"]["name"].as_str().unwrap_or_default());
        let found = index.claims.get(&key).filter(|found| !found.terminating);
        found.is_some() && index.claims.find_in_group(&ctx.group, &key).is_none()
    })
}

fn cache_claim(ctx: &CloneSetContext<'_>, stored: &PersistentVolumeClaim, what: Written) {
    let key = Key::from_object(stored);
    let entry = versioned_claim(&key, &ClaimView::from_object(stored));
    ctx.index().claims.apply_write(&key, entry, what, Instant::now());
}

/// Changes the owners of a claim.
pub(super) async fn patch_claim(ctx: &CloneSetContext<'_>, claim: &ClaimPatch) -> Result<(), Error> {
    let ClaimPatch { name, uid, patch } = claim;
    match write::patch_strategic(&ctx.api(), name, patch).await {
        Ok(stored) => cache_claim(ctx, &stored.object()?, Written::Changed),
        Err(error) if error.retryable() && !error.conflict() => return Err(error),
        Err(error) => {
            // A deleted claim needs no other owner, and another claim of its name must not get it.
            let found = fetch_claim(ctx, name).await?;
            if found.is_some_and(|found| found.claim.uid == *uid) {
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Adopts orphaned claims, after a live read of each.
pub(super) async fn adopt_claims(ctx: &CloneSetContext<'_>, claims: &[OrphanClaim]) -> Result<(), Error> {
    for OrphanClaim {
        name,
        instance_id: instance,
    } in claims
    {
        let Some(found) = fetch_claim(ctx, name).await? else {
            continue;
        };
        let claim = &found.claim;
        let foreign = found.owner.is_some() || claim.has_other_controller || claim.instance_id != *instance;
        if foreign || claim.terminating {
            continue;
        }
        let patch = json!({ "metadata": {
            "uid": claim.uid, "resourceVersion": found.resource_version, "ownerReferences": [ctx.owner.controller_reference()],
        } });
        let stored = write::patch_strategic(&ctx.api(), name, &patch).await?;
        cache_claim(ctx, &stored.object()?, Written::Changed);
    }
    Ok(())
}

pub(super) async fn delete_claim(ctx: &CloneSetContext<'_>, name: &str, uid: &str) -> Result<(), Error> {
    write::delete(&ctx.api::<PersistentVolumeClaim>(), name, uid).await?;
    ctx.index()
        .claims
        .mark_deleted(&ctx.key(name), uid, Instant::now());
    Ok(())
}
