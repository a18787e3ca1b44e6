//! Stores the defaults of a template that was stored while no webhook filled them in.
//!
//! OpenKruise's manager makes a revision of the template as it is stored, and compares bytes: where the stored template
//! lacks defaults that its revision has, that manager would replace all Pods as soon as it starts. Only defaults are
//! added. What the API server does not know stays, and keeps the template as it is.

use std::time::{Duration, Instant};

use kube::Api;
use kube::api::{ApiResource, DynamicObject};
use serde_json::{Value, json};

use super::memory::Memory;
use super::plan::cut;
use super::work::Work;
use kruise_api::cloneset::CloneSet;
use kruise_cluster::pod_template::{Defaults, lost, stored};
use kruise_cluster::write::Stored;
use kruise_cluster::{Error, write};
use kruise_workload::in_place::normal::with_defaults;
use kruise_workload::revision;

/// Fields that the log names.
const MOST_NAMED: usize = 5;
/// Bytes of each.
const LONGEST_NAMED: usize = 200;

/// What a stored template lacks.
#[derive(Debug, PartialEq)]
enum Lacks {
    Nothing,
    /// Defaults alone; this is the template with them.
    Defaults(Value),
    /// The revision differs in these fields: OpenKruise would make another.
    Others(Vec<String>),
}

/// The template with the defaults that `held` has, as OpenKruise would have stored it; `None` where it lacks none.
fn filled(template: &Value, held: &Value, defaults: Defaults) -> Option<Value> {
    let mut prepared = template.clone();
    stored::prepare(&mut prepared, defaults);
    let mut filled = with_defaults(&prepared, held).unwrap_or(prepared);
    stored::template(template, &mut filled, defaults);
    (filled != *template).then_some(filled)
}

/// What the template lacks of its revision, whose data is `data`.
fn lacks(template: &Value, data: &str, defaults: Defaults) -> Lacks {
    if revision::data(template) == data {
        return Lacks::Nothing;
    }
    let Some(held) = revision::template(data) else {
        return Lacks::Nothing;
    };
    let filled = filled(template, &held, defaults);
    let known = filled.as_ref().unwrap_or(template);
    let mut others = lost(known, &held);
    others.extend(lost(&held, known));
    match filled {
        Some(filled) if others.is_empty() => Lacks::Defaults(filled),
        None if others.is_empty() => Lacks::Nothing,
        _ => Lacks::Others(others),
    }
}

/// Stores the defaults that the template lacks, once its revision is known. When to look again, if at a certain time.
pub async fn store(work: &Work<'_>, memory: &mut Memory) -> Option<Duration> {
    let generation = work.set.metadata.generation.unwrap_or_default();
    let defaults = Defaults::of(&work.ctx.options.feature_gates);
    let wait = memory
        .defaults_due(generation, Instant::now())
        .filter(|_| !defaults.none)?;
    let (of, wanted) = memory.wanted.as_ref()?;
    if *of != generation || !wait.is_zero() {
        return (*of == generation).then_some(wait);
    }
    let filled = match lacks(&work.set.spec.template, &wanted.data, defaults) {
        Lacks::Defaults(filled) => filled,
        Lacks::Others(mut fields) => {
            fields.truncate(MOST_NAMED);
            fields
                .iter_mut()
                .for_each(|field| *field = cut(field, LONGEST_NAMED));
            let revision = wanted.name.clone();
            if memory.defaults_differ(generation, fields.clone()) {
                tracing::info!(set = %work.name, revision, ?fields,
                    "template and revision differ in defaults; OpenKruise's manager would replace the Pods");
            }
            return None;
        }
        Lacks::Nothing => {
            memory.defaults_done(generation);
            return None;
        }
    };
    match put(work, generation, &filled).await {
        Ok(Some(stored)) => {
            tracing::info!(set = %work.name, "stored the defaults that the template was stored without");
            memory.defaults_stored(stored.metadata.generation.unwrap_or_default(), Instant::now());
            work.keep_set(stored);
            Some(Duration::ZERO)
        }
        // It has changed or gone, which is another pass.
        Ok(None) => None,
        Err(error) if error.retryable() || error.conflict() => {
            Some(memory.defaults_failed(&error, Instant::now()))
        }
        Err(error) => {
            tracing::warn!(set = %work.name, %error, "cannot store the defaults that the template lacks");
            Some(memory.defaults_refused(Instant::now()))
        }
    }
}

/// Writes the template, if the CloneSet is of that generation. Who manages which field stays as it was, as it does where a
/// webhook fills them in: else the next server-side apply of the same manifest would meet a conflict.
async fn put(work: &Work<'_>, generation: i64, template: &Value) -> Result<Option<CloneSet>, Error> {
    let resource = ApiResource::erase::<CloneSet>(&());
    let client = work.ctx.cluster.client.clone();
    let untyped: Api<DynamicObject> = Api::namespaced_with(client, work.namespace(), &resource);
    let before = write::get_metadata(&untyped, &resource, &work.name.name).await?;
    let Some(before) = before.filter(|now| now.generation == Some(generation)) else {
        return Ok(None);
    };
    let patch = json!({
        "metadata": { "uid": work.owner.uid, "resourceVersion": before.resource_version },
        "spec": { "template": template },
    });
    let api = work.api::<CloneSet>();
    let stored = write::patch_merge(&api, &work.name.name, &patch)
        .await?
        .object()?;
    if !before.managed_fields.iter().any(|one| one.origin().1 == "Apply") {
        return Ok(Some(stored));
    }
    let version = stored.metadata.resource_version.as_deref();
    let patch = write::ManagedFieldsPatch::new(version, before.managed_fields.iter().collect());
    match write::patch_merge(&api, &work.name.name, &patch)
        .await
        .and_then(Stored::object)
    {
        Ok(stored) => Ok(Some(stored)),
        Err(error) => {
            tracing::warn!(set = %work.name, %error,
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
    fn defaults_alone_are_stored() {
        let held =
            template(json!({ "name": "c", "image": "i:1", "imagePullPolicy": "Always", "resources": {} }));
        let data = revision::data(&held);
        let of = |container: Value| lacks(&template(container), &data, Defaults::default());
        assert_eq!(lacks(&held, &data, Defaults::default()), Lacks::Nothing);
        let mut filled = held.clone();
        assert_eq!(
            of(json!({ "name": "c", "image": "i:1" })),
            Lacks::Defaults(filled.clone())
        );
        let container = json!({ "name": "c", "image": "i:1", "imagePullPolicy": "Always", "resources": {},
            "args": [], "env": null });
        assert_eq!(
            of(container),
            Lacks::Nothing,
            "Go's types leave out what says nothing"
        );
        let container = json!({ "name": "c", "image": "i:1", "args": [] });
        if let Some(container) = filled
            .pointer_mut("/spec/containers/0")
            .and_then(Value::as_object_mut)
        {
            container.insert("args".to_owned(), json!([]));
        }
        assert_eq!(of(container), Lacks::Defaults(filled));
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
                of(container),
                Lacks::Others(fields),
                "the revision does not have it"
            );
        }
    }

    fn lack(template: &Value, held: &Value, defaults: Defaults) -> Lacks {
        lacks(template, &revision::data(held), defaults)
    }

    /// What somebody took out again is not put back: with the alias, Pods would keep a ServiceAccount that nobody asks for.
    #[test]
    fn what_no_webhook_fills_in_is_not_stored() {
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
            for (template, held) in [(&short, &long), (&long, &short)] {
                let found = lack(template, held, Defaults::default());
                assert!(matches!(found, Lacks::Others(_)), "{template} {found:?}");
            }
        }
    }

    #[test]
    fn ports_of_the_host_are_stored_with_their_gate() {
        let with = |container: Value| json!({ "spec": { "hostNetwork": true, "containers": [container] } });
        let short = with(json!({ "name": "c", "ports": [{ "containerPort": 80 }] }));
        let long = with(json!({ "name": "c", "imagePullPolicy": "Always",
            "ports": [{ "containerPort": 80, "hostPort": 80, "protocol": "TCP" }] }));
        let gate = Defaults {
            host_ports: true,
            ..Defaults::default()
        };
        let Lacks::Defaults(filled) = lack(&short, &long, gate) else {
            unreachable!("ports and pull policy are defaults")
        };
        let container = &filled["spec"]["containers"][0];
        assert_eq!(container["ports"], long["spec"]["containers"][0]["ports"]);
        assert_eq!(container["imagePullPolicy"], "Always");
        assert!(matches!(
            lack(&short, &long, Defaults::default()),
            Lacks::Others(_)
        ));
    }
}
