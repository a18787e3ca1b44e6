//! Stores the defaults of a template that was stored while no webhook filled them in.
//!
//! OpenKruise's manager creates a revision of the stored template and compares bytes: if the stored template lacks
//! defaults that its revision has, that manager would replace all Pods as soon as it starts. Only defaults are added.
//! Fields that the API server does not know are kept, and block the change of the template.

use std::time::{Duration, Instant};

use kube::Api;
use kube::api::{ApiResource, DynamicObject};
use serde_json::{Value, json};

use super::context::CloneSetContext;
use super::plan::truncate;
use super::reconcile_state::ReconcileState;
use kruise_api::cloneset::CloneSet;
use kruise_cluster::pod_template::{Defaulting, defaulting, dropped_fields};
use kruise_cluster::write::Stored;
use kruise_cluster::{Error, write};
use kruise_workload::in_place::normalize::with_defaults;
use kruise_workload::revision;

/// Maximum number of fields in the log.
const MAX_LOGGED_FIELDS: usize = 5;
/// Maximum bytes of each field in the log.
const MAX_LOGGED_FIELD_BYTES: usize = 200;

/// What a stored template lacks compared with its revision.
#[derive(Debug, PartialEq)]
enum MissingDefaults {
    Nothing,
    /// Only defaults; this is the template with them.
    Defaults(Value),
    /// The revision differs in these fields: OpenKruise would create another.
    OtherFields(Vec<String>),
}

/// The template with the defaults of `revision_template`, as OpenKruise would have stored it; `None` if it lacks none.
fn fill_defaults(template: &Value, revision_template: &Value, defaults: Defaulting) -> Option<Value> {
    let mut prepared = template.clone();
    defaulting::fill_defaults(&mut prepared, defaults);
    let mut filled = with_defaults(&prepared, revision_template).unwrap_or(prepared);
    defaulting::remove_extra_defaults(template, &mut filled, defaults);
    (filled != *template).then_some(filled)
}

/// What the template lacks compared with its revision, whose data is `data`.
fn missing_defaults(template: &Value, data: &str, defaults: Defaulting) -> MissingDefaults {
    if revision::encode_template(template) == data {
        return MissingDefaults::Nothing;
    }
    let Some(revision_template) = revision::decode_template(data) else {
        return MissingDefaults::Nothing;
    };
    let filled = fill_defaults(template, &revision_template, defaults);
    let candidate = filled.as_ref().unwrap_or(template);
    let mut others = dropped_fields(candidate, &revision_template);
    others.extend(dropped_fields(&revision_template, candidate));
    match filled {
        Some(filled) if others.is_empty() => MissingDefaults::Defaults(filled),
        None if others.is_empty() => MissingDefaults::Nothing,
        _ => MissingDefaults::OtherFields(others),
    }
}

/// Stores the defaults that the template lacks, once its revision is resolved. Returns when to requeue, if at a certain
/// time.
pub async fn store_defaults(ctx: &CloneSetContext<'_>, state: &mut ReconcileState) -> Option<Duration> {
    let generation = ctx.set.metadata.generation.unwrap_or_default();
    let defaults = Defaulting::from_gates(&ctx.manager.options.feature_gates);
    let wait = state
        .defaults_due(generation, Instant::now())
        .filter(|_| !defaults.disabled)?;
    let (resolved_for, desired) = state.desired_revision.as_ref()?;
    if *resolved_for != generation || !wait.is_zero() {
        return (*resolved_for == generation).then_some(wait);
    }
    let filled = match missing_defaults(&ctx.set.spec.template, &desired.data, defaults) {
        MissingDefaults::Defaults(filled) => filled,
        MissingDefaults::OtherFields(mut fields) => {
            fields.truncate(MAX_LOGGED_FIELDS);
            fields
                .iter_mut()
                .for_each(|field| *field = truncate(field, MAX_LOGGED_FIELD_BYTES));
            let revision = desired.name.clone();
            if state.defaults_differ(generation, fields.clone()) {
                tracing::info!(set = %ctx.name, revision, ?fields,
                    "template and revision differ in defaults; OpenKruise's manager would replace the Pods");
            }
            return None;
        }
        MissingDefaults::Nothing => {
            state.defaults_done(generation);
            return None;
        }
    };
    match write_template(ctx, generation, &filled).await {
        Ok(Some(stored)) => {
            tracing::info!(set = %ctx.name, "stored the defaults that the template was stored without");
            state.defaults_stored(stored.metadata.generation.unwrap_or_default(), Instant::now());
            ctx.cache_clone_set(stored);
            Some(Duration::ZERO)
        }
        // The CloneSet has changed or is deleted, which triggers another reconcile.
        Ok(None) => None,
        Err(error) if error.retryable() || error.conflict() => {
            Some(state.record_defaults_failure(&error, Instant::now()))
        }
        Err(error) => {
            tracing::warn!(set = %ctx.name, %error, "cannot store the defaults that the template lacks");
            Some(state.record_defaults_rejection(Instant::now()))
        }
    }
}

/// Writes the template if the CloneSet still has that generation. Field managers do not change, as with a webhook that
/// fills defaults in: otherwise the next server-side apply of the same manifest would conflict.
async fn write_template(
    ctx: &CloneSetContext<'_>,
    generation: i64,
    template: &Value,
) -> Result<Option<CloneSet>, Error> {
    let resource = ApiResource::erase::<CloneSet>(&());
    let client = ctx.manager.cluster.client.clone();
    let untyped: Api<DynamicObject> = Api::namespaced_with(client, ctx.namespace(), &resource);
    let before = write::get_metadata(&untyped, &resource, &ctx.name.name).await?;
    let Some(before) = before.filter(|now| now.generation == Some(generation)) else {
        return Ok(None);
    };
    let patch = json!({
        "metadata": { "uid": ctx.owner.uid, "resourceVersion": before.resource_version },
        "spec": { "template": template },
    });
    let api = ctx.api::<CloneSet>();
    let stored = write::patch_merge(&api, &ctx.name.name, &patch).await?.object()?;
    if !before.managed_fields.iter().any(|one| one.origin().1 == "Apply") {
        return Ok(Some(stored));
    }
    let version = stored.metadata.resource_version.as_deref();
    let patch = write::ManagedFieldsPatch::new(version, before.managed_fields.iter().collect());
    match write::patch_merge(&api, &ctx.name.name, &patch)
        .await
        .and_then(Stored::object)
    {
        Ok(stored) => Ok(Some(stored)),
        Err(error) => {
            tracing::warn!(set = %ctx.name, %error,
                "cannot restore who manages the template's fields; the next server-side apply may conflict with kruise-manager");
            Ok(Some(stored))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(container: Value) -> Value {
        json!({ "metadata": { "labels": { "app": "a" } }, "spec": { "containers": [container] } })
    }

    #[test]
    fn only_missing_defaults_are_stored() {
        let revision_template =
            template(json!({ "name": "c", "image": "i:1", "imagePullPolicy": "Always", "resources": {} }));
        let data = revision::encode_template(&revision_template);
        let missing = |container: Value| missing_defaults(&template(container), &data, Defaulting::default());
        assert_eq!(
            missing_defaults(&revision_template, &data, Defaulting::default()),
            MissingDefaults::Nothing
        );
        let mut filled = revision_template.clone();
        assert_eq!(
            missing(json!({ "name": "c", "image": "i:1" })),
            MissingDefaults::Defaults(filled.clone())
        );
        let container = json!({ "name": "c", "image": "i:1", "imagePullPolicy": "Always", "resources": {},
            "args": [], "env": null });
        assert_eq!(
            missing(container),
            MissingDefaults::Nothing,
            "Go's types leave out what says nothing"
        );
        let container = json!({ "name": "c", "image": "i:1", "args": [] });
        if let Some(container) = filled
            .pointer_mut("/spec/containers/0")
            .and_then(Value::as_object_mut)
        {
            container.insert("args".to_owned(), json!([]));
        }
        assert_eq!(missing(container), MissingDefaults::Defaults(filled));
        for (more, field) in [
            (json!({ "unknown": 1 }), "unknown"),
            (
                json!({ "terminationMessagePolicy": "File" }),
                "terminationMessagePolicy",
            ),
        ] {
            let mut container = json!({ "name": "c", "image": "i:1" });
            json_patch::merge(&mut container, &more);
            let fields = vec![format!("spec.template.spec.containers[0].{field}")];
            assert_eq!(
                missing(container),
                MissingDefaults::OtherFields(fields),
                "the revision does not have it"
            );
        }
    }

    fn missing_from(template: &Value, revision_template: &Value, defaults: Defaulting) -> MissingDefaults {
        missing_defaults(template, &revision::encode_template(revision_template), defaults)
    }

    /// A default that a user removed is not restored: with the alias, Pods would keep a ServiceAccount that no one
    /// requests.
    #[test]
    fn fields_no_webhook_defaults_are_not_stored() {
        let with = |spec: Value| {
            let mut template = template(json!({ "name": "c", "image": "i:1", "imagePullPolicy": "Always" }));
            json_patch::merge(&mut template, &json!({ "spec": spec }));
            template
        };
        let ephemeral = |claim: Value| {
            with(json!({ "volumes": [{ "name": "v",
                "ephemeral": { "volumeClaimTemplate": { "spec": claim } } }] }))
        };
        for (short, long) in [
            (
                with(json!({ "serviceAccountName": "x" })),
                with(json!({ "serviceAccountName": "x", "serviceAccount": "x" })),
            ),
            (
                with(json!({ "serviceAccount": "x" })),
                with(json!({ "serviceAccount": "x", "serviceAccountName": "x" })),
            ),
            (
                ephemeral(json!({ "accessModes": ["ReadWriteOnce"] })),
                ephemeral(json!({ "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem" })),
            ),
        ] {
            for (template, revision_template) in [(&short, &long), (&long, &short)] {
                let found = missing_from(template, revision_template, Defaulting::default());
                assert!(
                    matches!(found, MissingDefaults::OtherFields(_)),
                    "{template} {found:?}"
                );
            }
        }
    }

    #[test]
    fn host_ports_are_defaulted_with_their_gate() {
        let with = |container: Value| json!({ "spec": { "hostNetwork": true, "containers": [container] } });
        let short = with(json!({ "name": "c", "ports": [{ "containerPort": 80 }] }));
        let long = with(json!({ "name": "c", "imagePullPolicy": "Always",
            "ports": [{ "containerPort": 80, "hostPort": 80, "protocol": "TCP" }] }));
        let gate = Defaulting {
            host_ports: true,
            ..Defaulting::default()
        };
        let MissingDefaults::Defaults(filled) = missing_from(&short, &long, gate) else {
            unreachable!("ports and pull policy are defaults")
        };
        let container = &filled["spec"]["containers"][0];
        assert_eq!(container["ports"], long["spec"]["containers"][0]["ports"]);
        assert_eq!(container["imagePullPolicy"], "Always");
        assert!(matches!(
            missing_from(&short, &long, Defaulting::default()),
            MissingDefaults::OtherFields(_)
        ));
    }
}
