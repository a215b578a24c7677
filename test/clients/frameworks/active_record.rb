# ActiveRecord, the handler in a Rails controller, and the two forms of a schema.
require 'active_record'
require 'action_controller'
require 'stringio'

ActiveRecord::Base.establish_connection(adapter: 'postgresql', host: ENV['PGHOST'], port: ENV['PGPORT'],
                                        username: ENV['PGUSER'], database: ENV['PGDATABASE'], pool: 1)
require ENV['EXAMPLE']
require ENV['REQUESTS']

class Order < ActiveRecord::Base; end

class OrdersController < ApplicationController
  def create
    order(params[:customer], params[:rows].to_i)
    head :created
  end
end

class SearchController
  def index = head(:ok)
end

$stdout.sync = true

def fact(name, value) = puts("#{name}\t#{value}")

def order(customer, rows)
  Order.transaction { Order.insert_all(Array.new(rows) { { customer: customer } }) }
end

def error_of
  yield
rescue StandardError => e
  e
end

def state_of(error) = eval(ENV['STATE'])
def hint_of(error) = eval(ENV['HINT'])
def pid = Order.connection.select_value('SELECT pg_backend_pid()')

def answer(customer, rows)
  env = Rack::MockRequest.env_for("/?customer=#{customer}&rows=#{rows}", method: 'POST')
  status, headers = OrdersController.action(:create).call(env)
  "#{status} #{headers['Retry-After']}"
end

if ARGV == ['schemas']
  schema = StringIO.new
  ActiveRecord::SchemaDumper.dump(Order.connection, schema)
  fact('schema.rb', schema.string.include?('limit_orders'))
  ActiveRecord::Tasks::DatabaseTasks.root = ActiveRecord::Tasks::DatabaseTasks.db_dir = ENV['TMPDIR']
  ActiveRecord::Tasks::DatabaseTasks.structure_dump(ActiveRecord::Base.connection_db_config, "#{ENV['TMPDIR']}/structure.sql")
  fact('structure.sql', File.read("#{ENV['TMPDIR']}/structure.sql").include?('CREATE TRIGGER limit_orders'))
  exit
end

customer = ENV['CUSTOMER'].to_i
before = pid
fact('version', "ActiveRecord #{ActiveRecord::VERSION::STRING}, pg #{PG::VERSION}")
order(customer, 5)
error = error_of { order(customer, 1) }
fact('class', error.class)
fact('state', state_of(error))
fact('hint', hint_of(error))
fact('answer', answer(customer, 1))
fact('other answer', state_of(error_of { answer(customer + 1, 6) }))
fact('rows', state_of(error_of { order(customer + 2, 6) }))
fact('then', state_of(error_of { order(customer + 2, 1) }))
# The seventh in a minute is refused, whose border may be among them.
statuses = Array.new(13) { SearchController.action(:index).call(Rack::MockRequest.env_for('/', 'REMOTE_ADDR' => '192.0.2.1'))[0] }
fact('requests', statuses.uniq.join(' and '))
fact('connection', pid == before ? 'kept' : 'closed')
